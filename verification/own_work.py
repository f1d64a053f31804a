"""Whose work was it? What attribution saw of one call, and what a policy makes of it.

On a GPU the kernels that ran, by the module they are of (`verification.attribution`); on a CPU
samples of where threads were, taken from outside (`verification.sampling`). Both may only
lower a verdict.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

MAX_FOREIGN_SHARE = 0.2
"""Of the work of a call. Some is left for what moves data: casts, copies to make contiguous."""
MOVES_DATA = re.compile(r"FillFunctor|direct_copy|copy_device|LoadWithCast|memset|memcpy", re.I)
"""Kernels of torch that fill and copy, by name: they come from the same file as all others."""
LIBRARIES = {
    "cublas": re.compile(r"cublas|gemm|gemv|cutlass|nvjet|splitK", re.I),
    "cudnn": re.compile(r"cudnn|xmma_(fprop|dgrad)|implicit_convolve|conv2d|winograd", re.I),
}
"""What kernels of a library that a policy allows are called."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One call's work in any unit, and how many kernels of its own the solution launched."""

    own: float
    foreign: Mapping[str, float]
    """By kernel or file, without what the policy allows and what only moves data."""
    own_launches: int | None
    problems: tuple[str, ...] = ()

    @property
    def own_share(self) -> float | None:
        total = self.own + sum(self.foreign.values())
        return self.own / total if total > 0 else None


def of_launches(report: Mapping[str, Any], allowed: Collection[str]) -> Work:
    """The work in a solution worker's own account of one call; `allowed` libraries count as its
    own. Raises KeyError, TypeError, ValueError when the account is not one."""
    own, launches = 0.0, 0
    foreign: dict[str, float] = {}
    for kernel in report["kernels"]:
        ms, name = float(kernel["ms"]), str(kernel["name"])
        if kernel["own"]:
            own += ms
            launches += int(kernel["records"])
        elif any(LIBRARIES[library].search(name) for library in allowed):
            own += ms
        elif not MOVES_DATA.search(name):
            foreign[name] = foreign.get(name, 0.0) + ms
    problems = tuple(str(problem) for problem in report["problems"])
    return Work(own=own, foreign=foreign, own_launches=launches, problems=problems)


def objection(work: Work) -> str | None:
    """Why this is not the solution's own work, if it is not."""
    if work.own_launches == 0:
        return "no kernel of its own ran"
    share = work.own_share
    if share is not None and share < 1.0 - MAX_FOREIGN_SHARE:
        files = ", ".join(sorted(work.foreign, key=lambda f: -work.foreign[f])[:4])
        return f"{1 - share:.0%} of the work was done by {files}"
    return None
