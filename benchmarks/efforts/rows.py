"""What is kept of a verdict, and the table of all pairs."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.efforts.entries import KINDS
from benchmarks.verifier_table import spread
from schemas.records import Interval, Verdict
from training_export.rewards import reward

EFFORTS = ("reward", "publish")
TIERS = (-1.0, 1.0, 2.0, 3.0, None)
RIGHT, FAST_ENOUGH = "whether it is right", "how fast it is"
Z95 = 1.959964
DIGITS = 5
Row = dict[str, Any]


def side(verdict: Verdict) -> Row:
    """One verdict as JSON values. `worst`: the check that took most of its budget."""
    work = verdict.attribution
    return {
        "tier": reward(verdict),
        "status": str(verdict.status),
        "reason": verdict.reason[:500],
        "labels": list(verdict.labels),
        "speedup_eager": _interval(verdict.speedup_eager),
        "speedup_compile": _interval(verdict.speedup_compile),
        "aa_control": _interval(verdict.aa_control),
        **{
            f"{name}_ms": made.median_ms if made is not None else None
            for name, made in (
                ("solution", verdict.solution), ("eager", verdict.eager),
                ("compile", verdict.compile),
            )
        },
        "processes": verdict.processes,
        "own_share": work.own_share if work is not None else None,
        "worst": _worst(verdict),
    }  # fmt: skip


def _interval(ratio: Interval | None) -> list[float] | None:
    """[low, point, high]"""
    if ratio is None:
        return None
    return [round(value, DIGITS) for value in (ratio.low, ratio.point, ratio.high)]


def _worst(verdict: Verdict) -> Row | None:
    shares = [(c.error / c.budget, c) for c in verdict.checks if c.budget and c.error is not None]
    if not shares:
        return None
    share, check = max(shares, key=lambda pair: pair[0])
    return {"check": f"{check.name} {check.distribution}", "share": float(f"{share:.4g}")}


def wilson(part: int, whole: int) -> tuple[float, float]:
    """The 95 % interval of a share. ValueError without anything to have a share of."""
    if whole < 1:
        raise ValueError("a share of nothing")
    share, square = part / whole, Z95**2
    middle = (share + square / (2 * whole)) / (1 + square / whole)
    width = math.sqrt(share * (1 - share) / whole + square / (4 * whole**2))
    width *= Z95 / (1 + square / whole)
    return max(0.0, middle - width), min(1.0, middle + width)


def tiers(row: Row) -> tuple[float | None, float | None]:
    return row["reward"]["tier"], row["publish"]["tier"]


def decided(rows: Iterable[Row]) -> list[Row]:
    """Pairs in which both sides have a tier: without, our side failed."""
    return [row for row in rows if None not in tiers(row)]


def figures(rows: Sequence[Row]) -> Row:
    """The numbers of the table."""
    both = decided(rows)
    agreed = [row for row in both if len(set(tiers(row))) == 1]
    return {
        "pairs": len(rows),
        "decided": len(both),
        "agreed": len(agreed),
        "interval": wilson(len(agreed), len(both)) if both else None,
        "by_kind": {
            kind: (
                sum(row["kind"] == kind for row in agreed),
                sum(row["kind"] == kind for row in both),
            )
            for kind in KINDS
        },
        "about": Counter(about(row) for row in both if len(set(tiers(row))) > 1),
        "one_sided": Counter(found for row in both for found in _one_sided(row)),
        "table": Counter(tiers(row) for row in rows),
        "log_ratio": {name: _apart(both, name) for name in ("speedup_eager", "speedup_compile")},
        "seconds": {
            f"{effort}, {name}": spread(
                row[effort]["seconds"] - row[effort]["build_s"]
                for row in rows
                if (row[effort]["tier"] == -1.0) == refused
            )
            for effort in EFFORTS
            for name, refused in (("accepted", False), ("refused", True))
        },
        "build_s": spread(row[row["first"]]["build_s"] for row in rows),
    }


def about(row: Row) -> str:
    """What a disagreement is about."""
    return RIGHT if -1.0 in tiers(row) else FAST_ENOUGH


def _one_sided(row: Row) -> list[str]:
    """The effort that refuses what the other one lets pass, and the guard it names."""
    refusing = [effort for effort in EFFORTS if row[effort]["tier"] == -1.0]
    named = [f"{effort} {row[effort]['reason'].split(':')[0]}" for effort in refusing]
    return named if len(named) == 1 else []


def _apart(rows: Sequence[Row], name: str) -> Row | None:
    """How far the speedups of the two efforts differ: |log(one / other)|."""
    pairs = [(row["reward"][name], row["publish"][name]) for row in rows]
    logs = sorted(abs(math.log(a[1] / b[1])) for a, b in pairs if a and b)
    if not logs:
        return None
    at = math.ceil(0.9 * len(logs)) - 1
    return {"median": statistics.median(logs), "p90": logs[at], "max": logs[-1], "count": len(logs)}


def table(rows: Sequence[Row]) -> str:
    """Everything as text."""
    found = figures(rows)
    if not found["decided"]:
        return f"{len(rows)} pairs, none of them decided by both efforts"
    low, high = found["interval"]
    lines = [
        f"{found['agreed']} of {found['decided']} pairs agree in tier: "
        f"{found['agreed'] / found['decided']:.1%}, 95 % interval {low:.1%} to {high:.1%}; "
        f"{found['pairs'] - found['decided']} more without a tier of both",
        *(f"{count} apart about {what}" for what, count in found["about"].items()),
        *(f"refused only by {who}: {count}" for who, count in found["one_sided"].most_common()),
        "of each kind: "
        + ", ".join(f"{kind} {a}/{n}" for kind, (a, n) in found["by_kind"].items()),
        *_crossed(found["table"]),
        *_speeds(found["log_ratio"]),
        *_seconds(found),
    ]
    apart = [row for row in rows if len(set(tiers(row))) > 1 or None in tiers(row)]
    return "\n".join([*lines, *(["disagreements:"] if apart else []), *map(describe, apart)])


def _crossed(counts: Counter[Any]) -> list[str]:
    shown = [tier for tier in TIERS if any(tier in pair for pair in counts)]
    head = "reward down, publish across".ljust(28) + "".join(f"{_tier(t):>6}" for t in shown)
    return [
        head,
        *(_tier(a).rjust(28) + "".join(f"{counts[a, b]:6}" for b in shown) for a in shown),
    ]


def _speeds(apart: dict[str, Row | None]) -> list[str]:
    return [
        f"{name}: |log ratio| of the two efforts {found['median']:.4f} in the median, "
        f"{found['p90']:.4f} at 90 %, {found['max']:.4f} at most ({found['count']} pairs)"
        for name, found in apart.items()
        if found is not None
    ]


def _seconds(found: Row) -> list[str]:
    rows = {f"s {name}, without the build": s for name, s in found["seconds"].items()}
    rows["s build"] = found["build_s"]
    return [
        f"{name}: {s['median']:.2f} in the median, {s['p90']:.2f} at 90 % ({s['count']})"
        for name, s in rows.items()
        if s is not None
    ]


def describe(row: Row) -> str:
    """A disagreement in full."""
    head = f"  {row['id']} ({row['kind']}, {row['what']}), {row['first']} was asked first"
    return "\n".join([head, *(f"    {effort}: {_said(row[effort])}" for effort in EFFORTS)])


def _said(found: Row) -> str:
    parts = [f"tier {_tier(found['tier'])}, {found['status']}"]
    parts += [found["reason"]] if found["reason"] else []
    for name in ("speedup_eager", "speedup_compile"):
        if found[name]:
            low, point, high = found[name]
            parts.append(f"{name} {point:.4f} [{low:.4f}, {high:.4f}]")
    if found["worst"]:
        parts.append(f"{found['worst']['share']:.3g} of the budget in {found['worst']['check']}")
    parts += [f"labels {', '.join(found['labels'])}"] if found["labels"] else []
    return "; ".join(parts)


def _tier(tier: float | None) -> str:
    return "none" if tier is None else f"{tier:g}"
