"""What verifiers decided, counted and timed: the rows of the comparison."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.verifier_cases import HONEST, KINDS

HEAD = (
    "verifier", "honest", "wrong", "exploits", "errors", "s accepted", "s refused",
    "s after build", "a minute", "times",
)  # fmt: skip
LEGEND = """honest: accepted of those asked about; wrong, exploits: refused of those asked about
s accepted, s refused: wall seconds a verdict, median / 90 % point; after build: of the refused
times: verdicts a minute over those of the CUDA-Agent scripts"""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One verdict of one verifier on a solution of which the truth is known."""

    case: str
    kind: str
    accepted: bool | None
    """None when the verifier came to no decision."""
    seconds: float
    timed: bool = True
    """Whether nothing that this comparison ran beside it falsifies `seconds`."""
    finished_s: float | None = None
    """Since the clock of its run began."""
    build_s: float | None = None
    """Of `seconds`, where the build can be told apart."""
    claimed_ms: float | None = None
    """What the verifier says a call of the solution takes."""
    status: str = ""
    reason: str = ""
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def right(self) -> bool:
        return self.accepted is (self.kind == HONEST)


def run_row(
    verifier: str, decisions: Sequence[Decision], per_minute: float | None, **more: Any
) -> dict[str, Any]:
    """A verifier's row as JSON values: every decision, and the figures made from them."""
    return {
        "verifier": verifier,
        "verdicts_per_minute": None if per_minute is None else round(per_minute, 2),
        **more,
        "figures": figures(decisions),
        "decisions": [asdict(decision) for decision in decisions],
    }


def figures(decisions: Sequence[Decision]) -> dict[str, Any]:
    """Counts by kind, and seconds of the decisions that were timed."""
    timed = [d for d in decisions if d.timed]
    refused = [d for d in timed if d.accepted is False]
    built = [d for d in refused if d.build_s is not None]
    wrong = {f"{d.case}: {_said(d)}" for d in decisions if not d.right}
    return {
        "right": {kind: sum(d.right for d in decisions if d.kind == kind) for kind in KINDS},
        "asked": {kind: sum(d.kind == kind for d in decisions) for kind in KINDS},
        "errors": sum(not d.right for d in decisions),
        "wrongly": sorted(wrong),
        "unmeasured": sum(d.status == "unmeasured" for d in decisions),
        "accepted_s": spread(d.seconds for d in timed if d.accepted),
        "refused_s": spread(d.seconds for d in refused),
        "refused_after_build_s": spread(d.seconds - (d.build_s or 0.0) for d in built),
        "build_s": spread(d.build_s for d in timed if d.build_s is not None),
    }


def _said(decision: Decision) -> str:
    if decision.accepted is None:
        return f"no decision: {decision.reason:.200}"
    return "accepted" if decision.accepted else f"refused: {decision.reason:.200}"


def spread(values: Iterable[float]) -> dict[str, float] | None:
    """Median, 90 % point (the smallest value that 90 % do not exceed), largest, and how many."""
    found = sorted(values)
    if not found:
        return None
    return {
        "median": round(statistics.median(found), 3),
        "p90": round(found[math.ceil(0.9 * len(found)) - 1], 3),
        "max": round(found[-1], 3),
        "count": len(found),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text; `times` is over the row of the CUDA-Agent scripts, if there is one."""
    base = next((r["verdicts_per_minute"] for r in rows if r["verifier"] == "cuda_agent"), None)
    lines = [HEAD, *(_cells(row, base) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    text = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines]
    errors = [f"  {row['verifier']}: {why}" for row in rows for why in row["figures"]["wrongly"]]
    return "\n".join([*text, LEGEND, *(["errors:", *errors] if errors else [])])


def _cells(row: dict[str, Any], base: float | None) -> tuple[str, ...]:
    found, rate = row["figures"], row["verdicts_per_minute"]
    counts = [f"{found['right'][kind]}/{found['asked'][kind]}" for kind in KINDS]
    seconds = [_pair(found[key]) for key in ("accepted_s", "refused_s", "refused_after_build_s")]
    times = f"{rate / base:.0f}" if rate is not None and base else "-"
    speed = "-" if rate is None else f"{rate:.1f}"
    return (row["verifier"], *counts, str(found["errors"]), *seconds, speed, times)


def _pair(found: dict[str, float] | None) -> str:
    return "-" if found is None else f"{found['median']:.2f} / {found['p90']:.2f}"
