"""Whose work was it? What attribution saw of the calls, and what a policy makes of it.

On a GPU the kernels that ran in one call, by the module they are of (`workers/attribution.py`);
on a CPU samples of where threads were in some calls, taken from outside
(`sampling.py`). Both may only lower a verdict.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verification.sampling import shares

MAX_FOREIGN_SHARE = 0.2
"""Of the work of a call. Some is left for what moves data: casts, copies to make contiguous."""
MAX_SAMPLED_SHARE = 0.9
"""The same where samples tell: torch's copies and casts, which a solution may use, lie in one file
with all it computes. Copying takes two thirds of the samples of a light kernel's calls; where torch
computes, next to none are the kernel's. Not covered: a solution that leaves its own kernel a tenth
of the work; with that kernel dead it is wrong or it falls to the knock-out."""
MIN_SAMPLES = 30
"""Own and foreign ones, before anything is concluded."""
MOVES_DATA = re.compile(r"FillFunctor|direct_copy|copy_device|LoadWithCast|memset|memcpy", re.I)
"""Kernels of torch that fill and copy, by name: they come from the same file as all others."""
LIBRARIES = {
    "cublas": re.compile(r"cublas|gemm|gemv|cutlass|nvjet|splitK", re.I),
    "cudnn": re.compile(r"cudnn|xmma_(fprop|dgrad)|implicit_convolve|conv2d|winograd", re.I),
}
"""What kernels of a library that a policy allows are called."""
MATHS = ("libm.so", "libm-", "libmvec")
"""What kernels call for exp and the like. torch mostly brings its own."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of some calls in any unit, and how many kernels of its own the solution ran."""

    own: float
    foreign: Mapping[str, float]
    """By kernel or file, without what the policy allows and what only moves data."""
    own_launches: int | None
    """None where that is not known."""
    problems: tuple[str, ...] = ()

    @property
    def own_share(self) -> float | None:
        total = self.own + sum(self.foreign.values())
        return self.own / total if total > 0 else None


def of_launches(report: Mapping[str, Any], allowed: Collection[str]) -> Work:
    """The work in a solution worker's own account of one call; libraries that are `allowed` count
    as its own, torch never does. Raises KeyError, TypeError, ValueError when it is no account."""
    own, launches = 0.0, 0
    foreign: dict[str, float] = {}
    _amount(report["busy_ms"])
    for kernel in report["kernels"]:
        ms, name, records = _amount(kernel["ms"]), str(kernel["name"]), _amount(kernel["records"])
        if kernel["own"]:
            own += ms
            launches += int(records)
        elif any(LIBRARIES[library].search(name) for library in allowed if library in LIBRARIES):
            own += ms
        elif not MOVES_DATA.search(name):
            foreign[name] = foreign.get(name, 0.0) + ms
    problems = tuple(str(problem) for problem in report["problems"])
    # That nothing was seen says nothing where not everything was seen.
    known = launches if launches or not problems else None
    return Work(own=own, foreign=foreign, own_launches=known, problems=problems)


def _amount(value: Any) -> float:
    """A number that is not below zero. Raises TypeError, ValueError."""
    if not isinstance(value, int | float):
        raise TypeError(f"expected a number, got {value!r:.80}")
    if not (0 <= value < math.inf and value < 2**63):
        raise ValueError(f"expected a finite number of at least 0, got {value!r:.80}")
    return float(value)


def of_samples(report: Mapping[str, int], libraries: Collection[str]) -> Work | None:
    """The work in samples by file. None when there are too few to tell.

    `libraries`: the solution's own, as its process has loaded them; maths libraries of the system
    count as its own. What serves everybody (interpreter, thread pools) counts for neither.
    """
    own = 0
    foreign: dict[str, float] = {}
    for file, count in report.items():
        sides = [shares({file: count}, Path(library)) for library in libraries]
        neutral = sides == [(0.0, 0.0)] * len(sides)
        if any(mine for mine, _ in sides) or (neutral and os.path.basename(file).startswith(MATHS)):
            own += count
        elif not neutral:
            name = os.path.basename(file)
            foreign[name] = foreign.get(name, 0) + count
    if own + sum(foreign.values()) < MIN_SAMPLES:
        return None
    return Work(own=own, foreign=foreign, own_launches=None)


def objection(work: Work, most: float = MAX_FOREIGN_SHARE) -> str | None:
    """Why this is not the solution's own work, if it is not. `most`: the share that others may
    have."""
    if work.own_launches == 0:
        return "no kernel of its own ran"
    share = work.own_share
    if share is not None and share < 1.0 - most:
        files = ", ".join(sorted(work.foreign, key=lambda f: -work.foreign[f])[:4])
        return f"{1 - share:.0%} of the work was done by {files}"
    return None
