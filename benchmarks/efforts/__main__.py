"""Do the two efforts of the verifier, `reward` and `publish`, agree on the tier of the reward?

    python -m benchmarks.efforts --target=cuda --num=500 --workers=12 --seconds=540 --json=FILE
    python -m benchmarks.efforts --target=cuda --num=500 --also=FILE --json=FILE2
    python -m benchmarks.efforts --target=cuda --num=0 --also=FILE,FILE2

Each of many mixed solutions (benchmarks/efforts/mix.py) is judged at both efforts, in the same
session. The JSON is written after every pair. `--also` names files of earlier runs: their pairs
count and are not asked about again, so that many pairs can be gathered piece by piece; the new file
has the new pairs only. The last of the commands above prints the table of what there is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.efforts.rows import table, tiers
from benchmarks.efforts.run import Plan, run
from benchmarks.peer_verifiers import PeerError, gpu
from runtime.lease import held_seconds
from schemas.codec import to_json
from schemas.records import Target
from training_export.run_record import git_commit, versions
from verification.harness import harness_hash
from verification.machine import Machine, MachineSettings

ROOT = Path(__file__).resolve().parents[2]
Record = dict[str, Any]
MUST_MATCH = ("target", "seed", "harness")


class UsageError(Exception):
    """What is wrong with the flags, in one line."""


def main(argv: list[str]) -> int:
    options = _options(argv)
    try:
        earlier = [_read(file, options) for file in options.also]
        _check(options, earlier)
        with tempfile.TemporaryDirectory(prefix="efforts-") as folder:
            record = _run(argv, options, earlier, Path(folder)) if options.num else None
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows = [row for one in (*earlier, *([record] if record else [])) for row in one["rows"]]
    print(table(rows))
    return 0


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.efforts",
        description=__doc__.splitlines()[0] if __doc__ else "",
    )
    add = parser.add_argument
    add("--target", choices=[str(t) for t in Target], default="cuda")
    add("--device", default="cuda:0")
    add("--num", type=int, default=500, help="pairs in all, with those of --also; 0: table only")
    add("--seed", type=int, default=0, help="of the composed problems")
    add("--workers", type=int, default=1, help="processes that share the device")
    add("--seconds", type=float, default=540.0, help="after which no solution is begun")
    add("--also", type=_listed, default=[], help="JSON of earlier runs, by commas")
    add("--json", help="where everything of this run goes")
    add("--partial_isolation", action="store_true",
        help="publish also where a solution cannot be isolated fully; recorded")  # fmt: skip
    add("--device_memory_gib", type=float, default=16.0, help="at most, of a process")
    add("--cache", default=os.path.join(tempfile.gettempdir(), "ops6k-efforts"),
        help="where built libraries and compiled baselines stay from run to run")  # fmt: skip
    return parser.parse_args(argv)


def _listed(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _read(file: str, options: argparse.Namespace) -> Record:
    """An earlier run. Raises UsageError where its pairs cannot stand beside new ones."""
    try:
        found = json.loads(Path(file).read_text())
        theirs = {name: found[name] for name in (*MUST_MATCH, "rows", "skipped")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"--also: expected a file that --json wrote, {file} is none: "
            f"{type(error).__name__}: {error}"
        ) from error
    ours = {"target": options.target, "seed": options.seed, "harness": harness_hash()}
    # A table of old pairs needs no verifier.
    for name in MUST_MATCH if options.num else MUST_MATCH[:1]:
        if theirs[name] != ours[name]:
            raise UsageError(
                f"--also: {file} was made with {name} {theirs[name]}, here it is {ours[name]}"
            )
    return dict(found)


def _check(options: argparse.Namespace, earlier: list[Record]) -> None:
    """Raises UsageError, before any work."""
    for name, least in (("num", 0), ("workers", 1), ("seconds", 0), ("seed", 0)):
        if getattr(options, name) < least:
            raise UsageError(f"--{name}: expected {least} or more, got {getattr(options, name)}")
    if options.device_memory_gib <= 0:
        raise UsageError(
            f"--device_memory_gib: expected more than 0, got {options.device_memory_gib}"
        )
    seen = [row["id"] for one in earlier for row in one["rows"]]
    if len(seen) != len(set(seen)):
        raise UsageError("--also: two of the files have the same pairs")
    if options.json:
        target = Path(options.json).resolve()
        if target in [Path(file).resolve() for file in options.also]:
            raise UsageError(f"--json: {options.json} is one of --also, name a new file")
        if not target.parent.is_dir() or target.is_dir():
            raise UsageError(f"--json: expected a file in a folder that is there, got {target}")
    if not options.num and not options.also:
        raise UsageError("--num=0 prints a table of --also, which names no file")
    if options.num and options.target == "cuda":
        try:
            gpu()
        except PeerError as error:
            raise UsageError("--target=cuda: nvidia-smi finds no GPU; say --target=cpu") from error


def _run(
    argv: list[str], options: argparse.Namespace, earlier: list[Record], folder: Path
) -> Record:
    """Judge until there are pairs enough or time is over. Raises UsageError."""
    began = time.time()
    settings = _settings(options, folder)
    record: Record = {
        "command": ["python", "-m", "benchmarks.efforts", *argv],
        "commit": git_commit(str(ROOT)),
        "cpus": len(os.sched_getaffinity(0)),
        "versions": versions(),
        "target": options.target,
        "seed": options.seed,
        "harness": harness_hash(),
        "partial_isolation": options.partial_isolation,
        **_about(settings, options.partial_isolation, earlier),
        "rows": [], "skipped": [], "errors": [],
    }  # fmt: skip
    pairs = sum(len(one["rows"]) for one in earlier)
    done = {row["id"] for one in earlier for name in ("rows", "skipped") for row in one[name]}
    plan = Plan(
        settings=settings, seed=options.seed, num=options.num, done=frozenset(done), pairs=pairs,
        ends=began + options.seconds, partial_isolation=options.partial_isolation,
    )  # fmt: skip
    with tqdm(total=options.num, initial=pairs, unit="pair", smoothing=0.05) as bar:
        for kind, row in run(plan, options.workers):
            record[{"pair": "rows", "skipped": "skipped", "error": "errors"}[kind]].append(row)
            _show(bar, kind, row)
            record["wall_s"] = round(time.time() - began, 1)
            record["device_alone_s"] = round(held_seconds(str(settings.lease_log), began), 1)
            if options.json:
                _write(Path(options.json), record)
    return record


def _show(bar: Any, kind: str, row: Record) -> None:
    if kind == "pair":
        bar.update()
        if len(set(tiers(row))) > 1:
            bar.write(
                f"{row['id']} ({row['what']}): {tiers(row)[0]} and {tiers(row)[1]}", sys.stderr
            )
    else:
        bar.write(f"{row['id']}: {kind}: {row['reason']:.150}", sys.stderr)


def _write(file: Path, record: Record) -> None:
    """Whole or not at all, however this ends."""
    part = file.with_name(f".{file.name}.part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.replace(file)


def _settings(options: argparse.Namespace, folder: Path) -> MachineSettings:
    """Verdicts are kept for this run only, so that every run measures anew."""
    target = Target(options.target)
    return MachineSettings(
        target=target,
        device="cpu" if target is Target.CPU else options.device,
        store=str(folder / "store"),
        cache=options.cache,
        device_memory_gib=options.device_memory_gib,
        lease_log=str(folder / "lease.log"),
    )


def _about(settings: MachineSettings, partial: bool, earlier: list[Record]) -> Record:
    """Where this is measured. Raises UsageError where it cannot be, or not beside the earlier."""
    with contextlib.closing(Machine(settings)) as machine:
        isolation, environment = machine.isolation, to_json(machine.environment)
    if not isolation.full and not partial:
        raise UsageError(
            f"publish needs full isolation, missing are {', '.join(isolation.missing)}; "
            "--partial_isolation goes on without"
        )
    for device in _devices(earlier):
        if device != environment["device"]:
            raise UsageError(f"--also: measured on {device}, this is {environment['device']}")
    return {"environment": environment, "isolation": to_json(isolation)}


def _devices(earlier: list[Record]) -> Iterator[str]:
    for one in earlier:
        yield one["environment"]["device"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
