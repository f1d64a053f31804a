"""Verifiers side by side on the same solutions: what each decides, and how long it takes.

    python -m benchmarks.verifiers --only=ours --workers=16 --json=FILE
    python -m benchmarks.verifiers --only=cuda_agent,kernelbench --cuda_agent_dir=DIR \\
        --kernelbench_dir=DIR --num_solutions=5 --also=FILE --json=FILE2

Four honest solutions, four wrong ones and four that deceive, each written once as `cabi` and
printed in the form a verifier takes. Ours is asked about a new text each time, first by one process
and then by many (benchmarks/verifier_ours.py); the scripts of CUDA-Agent and KernelBench's
evaluator are run from copies the user names (benchmarks/peer_verifiers.py). `--also` adds the rows
of an earlier file to the table. The JSON is written after every row.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peer_verifiers import (
    CudaAgent,
    Gpu,
    KernelBench,
    PeerError,
    gpu,
    peer_row,
    run_peer,
    strictly,
)
from benchmarks.verifier_cases import CASES, KINDS, SUBJECTS, Case
from benchmarks.verifier_ours import plan_of, run_ours
from benchmarks.verifier_table import Decision, table
from schemas.records import Target
from training_export.run_record import git_commit, version_of

ROOT = Path(__file__).resolve().parent.parent
VERIFIERS = ("ours", "cuda_agent", "kernelbench")
PACKAGES = ("torch", "triton", "ninja", "litellm", "openai")


def main(argv: list[str]) -> int:
    options = _options(argv)
    chosen = [case for case in CASES if case.kind in options.kinds]
    try:
        device = gpu() if options.target == "cuda" else None
        peers = _peers(options, device)
    except PeerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    record = _record(argv, options, chosen, device)
    record["peers"] = {name: {"files": peer.files} for name, peer in peers.items()}
    earlier = json.loads(Path(options.also).read_text())["rows"] if options.also else []
    with tempfile.TemporaryDirectory(prefix="verifiers-") as folder:
        for row in _rows(options, chosen, peers, Path(folder)):
            record["rows"].append(row)
            rate = row["verdicts_per_minute"]
            print(f"{row['verifier']}: {len(row['decisions'])} verdicts, {rate} a minute",
                  flush=True)  # fmt: skip
            if options.json:
                Path(options.json).write_text(json.dumps(record, indent=1) + "\n")
    print(table([*earlier, *record["rows"]]))
    return 0


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add = parser.add_argument
    add("--target", choices=[str(t) for t in Target], default="cuda")
    add("--device", default="cuda:0")
    add("--problem", choices=list(SUBJECTS), default="short")
    add("--only", type=_listed, default=list(VERIFIERS), help="of ours,cuda_agent,kernelbench")
    add("--kinds", type=_listed, default=list(KINDS), help="of honest,wrong,exploit")
    add("--workers", type=_listed, default=["16"], help="processes of ours, one row for each")
    add("--seconds", type=float, default=60.0, help="for which verdicts of ours are counted")
    add("--ramp_s", type=float, default=8.0, help="before that")
    add("--alone_s", type=float, default=30.0, help="at least, of ours with one process")
    add("--device_memory_gib", type=float, default=16.0, help="at most, of a process of ours")
    add("--cuda_agent_dir", help="a copy of github.com/BytedTsinghua-SIA/CUDA-Agent")
    add("--kernelbench_dir", help="a copy of github.com/ScalingIntelligence/KernelBench")
    add("--num_solutions", type=int, default=len(CASES), help="the first so many for the others")
    add("--alone", type=int, default=2, help="of these, with nothing beside them")
    add("--beside", type=int, default=6, help="of the rest, at a time")
    add("--also", help="the JSON of an earlier run, whose rows are added to the table")
    add("--json", help="where everything goes")
    options = parser.parse_args(argv)
    for given, known in ((options.only, VERIFIERS), (options.kinds, KINDS)):
        if not given or not set(given) <= set(known):
            parser.error(f"expected some of {','.join(known)}, got {','.join(given)!r}")
    return options


def _listed(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _peers(options: argparse.Namespace, device: Gpu | None) -> dict[str, CudaAgent | KernelBench]:
    """The verifiers of others that are asked for. Raises PeerError, before anything is run."""
    named = {"cuda_agent": options.cuda_agent_dir, "kernelbench": options.kernelbench_dir}
    asked = {name: where for name, where in named.items() if name in options.only}
    missing = [name for name, where in asked.items() if not where]
    if missing:
        flags = " and ".join(f"--{name}_dir=DIR" for name in missing)
        raise PeerError(f"expected {flags} with a copy of it, got none; or say --only=ours")
    if not asked:
        return {}
    if device is None:
        raise PeerError(f"{' and '.join(asked)} need --target=cuda, got {options.target}")
    subject = SUBJECTS[options.problem]
    made: dict[str, CudaAgent | KernelBench] = {}
    if "cuda_agent" in asked:
        made["cuda_agent"] = CudaAgent(options.cuda_agent_dir, subject, device)
    if "kernelbench" in asked:
        evaluator = made["kernelbench"] = KernelBench(options.kernelbench_dir, subject, device)
        evaluator.check_imports()
    return made


def _rows(
    options: argparse.Namespace,
    cases: list[Case],
    peers: dict[str, CudaAgent | KernelBench],
    root: Path,
) -> Iterator[dict[str, Any]]:
    if "ours" in options.only:
        plan = plan_of(options, tuple(case.name for case in cases), root)
        yield from run_ours(plan, [int(count) for count in options.workers])
    for name, peer in peers.items():
        first = cases[: options.num_solutions]
        row = run_peer(name, peer.decide, first, options.alone, options.beside, root)
        yield row
        if name == "kernelbench":
            made = strictly([Decision(**decision) for decision in row["decisions"]])
            yield peer_row("kernelbench, strict", made, options.alone, options.beside)


def _record(
    argv: list[str], options: argparse.Namespace, cases: list[Case], device: Gpu | None
) -> dict[str, Any]:
    return {
        "command": ["python", "-m", "benchmarks.verifiers", *argv],
        "commit": git_commit(str(ROOT)),
        "device": asdict(device) if device else None,
        "cpus": len(os.sched_getaffinity(0)),
        "python": sys.version.split()[0],
        "packages": {name: version_of(name) for name in PACKAGES},
        "problem": SUBJECTS[options.problem].problem(Target(options.target)).code,
        "solutions": {case.name: case.kind for case in cases},
        "rows": [],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
