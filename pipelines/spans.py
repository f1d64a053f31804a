"""How long stages took, as appended lines: stage, start (seconds since the epoch), seconds.

Workers are processes that may be killed, so a line is written when an element is done, beside the
store. A stage's time is the length of the union of its spans: wall time in which it was at work,
however many workers shared it and however often the run was restarted. Only a local store has
one.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator

from runtime import rowlog

Span = tuple[float, float]
"""Start and end, in seconds since the epoch."""


@contextlib.contextmanager
def span(log: str | None, stage: str) -> Iterator[None]:
    """Record how long the block took, also when it raises."""
    started = time.time()
    try:
        yield
    finally:
        if log is not None:
            rowlog.append(log, stage, started, time.time() - started)


def seconds_per_stage(log: str | None, since: float = 0.0) -> dict[str, float]:
    """Wall seconds of each stage since a moment, in the order in which the stages first started."""
    if log is None:
        return {}
    spans: dict[str, list[Span]] = defaultdict(list)
    for stage, started, seconds in rowlog.rows(log, str, float, float):
        if started >= since:
            spans[stage].append((started, started + seconds))
    ordered = sorted(spans, key=lambda stage: min(spans[stage]))
    return {stage: round(covered(spans[stage]), 3) for stage in ordered}


def covered(spans: list[Span]) -> float:
    """Length of a union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
