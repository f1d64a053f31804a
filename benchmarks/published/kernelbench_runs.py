"""Kernels that a fork of KernelBench keeps in `runs/`, of any model, as its own scripts leave them.

    runs/RUN/level_2_problem_7_sample_0_kernel.py   or   runs/RUN/problem_7_kernel.py
    runs/RUN/eval_results.json                      or   runs/RUN/detailed_results.json
    runs/*/*.log                                    what the evaluation printed, perhaps

Those that the run's own evaluation found right. The claimed speedup is the reference's time over
the kernel's, of one evaluation on one device: older versions print the first only. The problems
are those of the fork.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.published.pairs import Pair, chosen
from benchmarks.published.records import Published, PublishedError, Suite, text_of
from schemas.records import Target

KERNEL = re.compile(r"(?:level_(?P<level>\d+)_)?problem_(?P<number>\d+)(?:_sample_0)?_kernel\.py")
LEVEL_OF_RUN = re.compile(r"(?:^|_)(?:level_?|l)(\d)(?:_|$)")
RUN = re.compile(r"'run_name': '([^']+)'")
EVALUATED = re.compile(r"\[Eval Result\] Problem ID: (\d+), Sample ID: 0$")
TIMES = re.compile(r"correctness=True .*\bruntime=([\d.]+) .*\bref_runtime=([\d.]+) ")

Times = Mapping[tuple[str, int], tuple[float, float]]
"""Of a run's problem: the kernel's milliseconds, the reference's."""


def read(root: Path, target: Target) -> Iterator[Published]:
    """Raises PublishedError."""
    return chosen(_pairs(root, _printed(root / "runs")))


def _pairs(root: Path, printed: Times) -> Iterator[Pair]:
    for run in sorted(path for path in (root / "runs").iterdir() if path.is_dir()):
        right = _found_right(run)
        for file in sorted(run.glob("*_kernel.py")):
            named = KERNEL.fullmatch(file.name)
            if named is None or (number := int(named["number"])) not in right:
                continue
            level = int(named["level"] or _level_of(run))
            problem = _problem(root / "KernelBench", level, number)
            yield Pair(
                name=f"{run.name}/{level}/{number}",
                level=level,
                problem=problem.stem,
                code=text_of(file),
                problem_code=text_of(problem),
                claimed=_claimed(right[number], printed.get((run.name, number))),
            )


def _problem(folder: Path, level: int, number: int) -> Path:
    found = sorted((folder / f"level{level}").glob(f"{number}_*.py"))
    if len(found) != 1:
        raise PublishedError(
            f"expected one file level{level}/{number}_*.py in {folder}, got {len(found)}"
        )
    return found[0]


def _level_of(run: Path) -> str:
    found = LEVEL_OF_RUN.search(run.name)
    if found is None:
        raise PublishedError(f"{run}: expected the level in the name of its folder or its kernels")
    return found[1]


def _found_right(run: Path) -> dict[int, dict[str, Any]]:
    """What was measured of the kernels that were found right, by the problem's number."""
    file = run / "eval_results.json"
    if not file.is_file():
        file = run / "detailed_results.json"
    if not file.is_file():
        return {}
    try:
        said = json.loads(text_of(file))
        if "results" in said:
            found = {int(row["problem_id"]): row.get("eval_result") for row in said["results"]}
        else:
            firsts = {key: row[0] if isinstance(row, list) else row for key, row in said.items()}
            found = {int(key): row for key, row in firsts.items()}
        return {number: row for number, row in found.items() if row and row["correctness"] is True}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise PublishedError(
            f"{file}: expected KernelBench's results of a run, got {error!r}"
        ) from error


def _claimed(result: Mapping[str, Any], printed: tuple[float, float] | None) -> float | None:
    runtime = result.get("runtime", -1)
    reference = result.get("ref_runtime", -1)
    if printed and printed[0] == runtime:  # it is of the same evaluation
        reference = printed[1]
    return reference / runtime if runtime > 0 and reference > 0 else None


def _printed(runs: Path) -> Times:
    found: dict[tuple[str, int], tuple[float, float]] = {}
    for file in sorted(runs.glob("*/*.log")):
        run, number = "", -1
        for line in file.read_text(errors="replace").splitlines():
            if named := RUN.search(line):
                run = named[1]
            elif at := EVALUATED.search(line):
                number = int(at[1])
            elif times := TIMES.search(line):
                found[run, number] = (float(times[1]), float(times[2]))
    return found


SUITE = Suite(url="a fork of github.com/ScalingIntelligence/KernelBench", marker="runs", read=read)
