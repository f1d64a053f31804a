"""The raw measurements of a finished run as one JSON file, for docs/runs.

    python -m benchmarks.record --run=DIR --json=FILE

`run.json` as it is, the hash of the verifier's sources and how many verdicts it measured with which
status, and for every trajectory what its best solution measured: the intervals, the A/A control,
and every timing sample in ms. The samples come from the store of the run, so the run must still
have it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runtime.store import Store
from schemas.codec import from_json
from schemas.records import Interval, Measurement, Problem, Trajectory

DIGITS = 4


def record(run: Path) -> dict[str, Any]:
    """Raises FileNotFoundError when the run has not ended or its store is gone."""
    ended = json.loads((run / "run.json").read_text())
    store = Store(str(run / ".store"))
    trajectories = list(_trajectories(store))
    if not trajectories:
        raise FileNotFoundError(f"{run}/.store has no trajectories: run this before it is deleted")
    verdicts = _all(store, "verdicts")
    return {
        "run": ended,
        "harness": sorted({verdict["harness"] for verdict in verdicts}),
        "measured_verdicts": dict(Counter(verdict["status"] for verdict in verdicts)),
        "trajectories": trajectories,
    }


def _trajectories(store: Store) -> Iterator[dict[str, Any]]:
    candidates = [from_json(Problem, value) for value in _all(store, "candidates")]
    problems = {problem.problem_id: problem for problem in candidates}
    found = [from_json(Trajectory, value) for value in _all(store, "trajectories")]
    for made in sorted(found, key=lambda t: (t.problem_id, t.kind)):
        problem, verdict = problems[made.problem_id], made.verdict
        row: dict[str, Any] = {
            "problem_id": made.problem_id,
            "kind": str(made.kind),
            "ops": list(problem.ops),
            "precision": str(problem.precision),
            "turns": len(made.turns),
            "verdicts": [str(t.verdict.status) for t in made.turns if t.verdict is not None],
            "stop": str(made.stop_reason),
        }
        if verdict is not None:
            row |= {
                "status": str(verdict.status),
                "headroom": verdict.headroom and round(verdict.headroom, DIGITS),
                "roofline_ms": verdict.roofline_ms and round(verdict.roofline_ms, DIGITS),
                "speedup_eager": _interval(verdict.speedup_eager),
                "speedup_compile": _interval(verdict.speedup_compile),
                "aa_control": _interval(verdict.aa_control),
                "samples_ms": {
                    side: _samples(getattr(verdict, side))
                    for side in ("eager", "compile", "solution")
                },
            }
        yield row


def _all(store: Store, kind: str) -> list[Any]:
    return [store.get(kind, key) for key in store.keys(kind)]


def _interval(ratio: Interval | None) -> list[float] | None:
    """[low, point, high]"""
    if ratio is None:
        return None
    return [round(value, DIGITS) for value in (ratio.low, ratio.point, ratio.high)]


def _samples(measured: Measurement | None) -> list[float] | None:
    if measured is None:
        return None
    return [round(sample, DIGITS) for sample in measured.samples_ms]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="The raw measurements of a run.")
    parser.add_argument("--run", required=True, help="the folder of a run that has ended")
    parser.add_argument("--json", required=True, help="the file to write")
    arguments = parser.parse_args(argv)
    found = record(Path(arguments.run))
    lines = ",\n".join(json.dumps(row) for row in found["trajectories"])
    head = json.dumps({name: found[name] for name in ("run", "harness", "measured_verdicts")})
    text = f'{head[:-1]},\n"trajectories": [\n{lines}\n]}}\n'
    Path(arguments.json).write_text(text)
    print(f"{len(found['trajectories'])} trajectories, {len(text)} bytes in {arguments.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
