"""How fast the main job is, and what bounds it.

    python -m benchmarks.pipeline [--json=FILE] --num_problems=20 --target=cpu ...   runs the main
                                                                                     job
    python -m benchmarks.pipeline [--json=FILE] --run=DIR                reads a run that has ended

The first form runs into a new folder with a store of its own, because finished work is not done
again. Every number comes from `run.json`, and one from the lease log beside the store. A stage's
seconds are wall time in which at least one worker was at it; the lease share is the share of all
seconds in which one measurement held the device for itself; the demand share adds those in which
one was waiting for others to leave the device.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pipelines.spans import covered
from runtime.lease import holds

DEVICE_BOUND = 0.6
"""From this lease share on, more workers cannot help: the device is measuring most of the time."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Problems per minute, and what bounds them.")
    parser.add_argument("--run", help="read the run in this folder instead of making one")
    parser.add_argument("--json", help="write the figures to this file too")
    arguments, flags = parser.parse_known_args(argv)
    if arguments.run:
        figures = _figures(Path(arguments.run))
    else:
        with tempfile.TemporaryDirectory(prefix="ops6k-benchmark-") as folder:
            command = [sys.executable, "-m", "pipelines.ops6k", f"--output={folder}/out", *flags]
            code = subprocess.run(command).returncode
            if code not in (0, 1):  # 1: some rows were lost to bugs of ours; the figures stand
                return code
            figures = _figures(Path(folder) / "out")
    text = json.dumps(figures, indent=2)
    if arguments.json:
        Path(arguments.json).write_text(text + "\n")
    print("\n" + "\n".join(table(figures)) + "\n" + text)
    return 0


def _figures(folder: Path) -> dict[str, Any]:
    record = dict(json.loads((folder / "run.json").read_text()))
    return figures_of(record, demand_seconds(folder / ".store" / "lease.log"))


def figures_of(record: dict[str, Any], demand_s: float | None = None) -> dict[str, Any]:
    """The figures of a run. Raises ValueError for a resumed one, whose time is not all of it."""
    attempts = record["settings"]["attempts"]
    if attempts != 1:
        raise ValueError(
            f"the run was started {attempts} times, so its seconds are not those of all its work: "
            "run it again into a new folder"
        )
    seconds = {stage: value for stage, value in record["seconds"].items() if stage != "total"}
    total = record["seconds"]["total"]
    return {
        "device": record["device"]["device"],
        "num_threads": record["device"]["num_threads"],
        "target": record["settings"]["target"],
        "commit": record["commit"],
        "command": record["command"],
        "versions": record["versions"],
        "candidates": record["candidates"],
        "kept": record["kept"],
        "trajectories": record["trajectories"],
        "total_s": total,
        "candidates_per_minute": 60 * record["candidates"] / total,
        "kept_per_minute": 60 * record["kept"] / total,
        "stage_s": seconds,
        "lease_share": record["lease_share"],
        "demand_share": None if demand_s is None else round(demand_s / total, 4),
        "bound_by": bound_by(seconds, total, record["lease_share"]),
    }


def bound_by(seconds: dict[str, float], total: float, lease_share: float | None) -> str:
    """What a faster run would have to change first."""
    if not seconds:
        return "not known: stage times are recorded on a local store only"
    slowest = max(seconds, key=lambda stage: seconds[stage])
    share = seconds[slowest] / total
    if lease_share is not None and lease_share >= DEVICE_BOUND:
        return f"the device: {lease_share:.0%} of the time one measurement holds it for itself"
    outside = max(0.0, 1 - sum(seconds.values()) / total)
    if outside > share:
        return f"start-up: {outside:.0%} of the time no stage is at work"
    return f"{slowest}, work beside the timings: {share:.0%} of the time"


def demand_seconds(log: Path) -> float | None:
    """Seconds in which a device was held alone or waited for by whoever wants that, the mean over
    devices; None without a log."""
    found = holds(str(log))
    spans = [[(start - waited, start + held) for start, held, waited in f] for f in found.values()]
    return sum(map(covered, spans)) / len(spans) if spans else None


def table(figures: dict[str, Any]) -> list[str]:
    """The figures for reading."""
    lines = [
        f"{figures['device']}, target {figures['target']}: {figures['candidates']} candidates, "
        f"{figures['kept']} kept, {figures['trajectories']} trajectories",
        f"{'seconds':<24}{figures['total_s']:>8.0f}",
        f"{'candidates per minute':<24}{figures['candidates_per_minute']:>8.1f}",
        f"{'kept per minute':<24}{figures['kept_per_minute']:>8.1f}",
    ]
    lines += [
        f"{stage + ' s':<24}{value:>8.1f}  {value / figures['total_s']:.0%}"
        for stage, value in figures["stage_s"].items()
    ]
    if figures["lease_share"] is not None:
        lines.append(f"{'device leased':<24}{figures['lease_share']:>8.0%}")
    if figures["demand_share"] is not None:
        lines.append(f"{'  or waited for':<24}{figures['demand_share']:>8.0%}")
    return [*lines, f"bound by {figures['bound_by']}"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
