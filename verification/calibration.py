"""What surrounds a call on the judge's clock, found out by calls of the baselines.

They are made one by one as the solution's are, in a process that can be believed, and touch as
much memory: a call that only kept the device busy would have less around it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from schemas.records import Target, VerdictStatus
from verification.bench import Bench, Refusal

CALLS = 6
BARE_CALLS = 8
BASELINES = ("eager", "compile")


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Milliseconds by the judge's clock."""

    eager_ms: float = 0.0
    """A call of eager, by its own clock."""
    around_ms: float = 0.0
    """Around a timed call, the larger one of the baselines."""
    launch_ms: float = 0.0
    """Around a bare call, its launch and the way there; on a GPU."""
    copy_ms: float = 0.0
    """Copying an output."""


def calibrate(bench: Bench) -> Surroundings:
    """The caller holds the device alone, and both sides are warm."""
    with bench.solution_stopped():
        eager_ms = statistics.median(bench.refer("time", side="eager", calls=3))
        around_ms = max(_around_ms(bench, side) for side in BASELINES)
        copies = [timed(lambda: bench.refer("rehearse_keep"))[1] for _ in range(3)]
    launch_ms = 0.0
    if bench.machine.target is Target.CUDA:
        launch_ms = max(_launch_ms(bench, side) for side in BASELINES)
    return Surroundings(
        eager_ms=eager_ms,
        around_ms=around_ms,
        launch_ms=launch_ms,
        copy_ms=statistics.median(copies),
    )


def _around_ms(bench: Bench, side: str) -> float:
    costs = []
    for _ in range(CALLS):
        bench.refer("prepare")
        reply, outside_ms = timed(lambda: bench.refer("call", side=side, bare=False))
        costs.append(outside_ms - milliseconds(reply))
    return statistics.median(costs)


def _launch_ms(bench: Bench, side: str) -> float:
    outside: list[float] = []
    for _ in range(BARE_CALLS):
        bench.refer("prepare")
        bench.refer("flush")  # or a warm cache would make this less
        outside.append(timed(lambda: bench.refer("call", side=side, bare=True))[1])
    inside = bench.refer("time", side=side, calls=BARE_CALLS)
    return max(0.0, statistics.median(outside) - statistics.median(inside))


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """(result, milliseconds on the judge's clock)."""
    started = time.perf_counter()
    result = call()
    return result, (time.perf_counter() - started) * 1e3


def milliseconds(reply: Any) -> float:
    """A worker's own time. Raises Refusal when it is no positive number."""
    value = reply.get("ms") if isinstance(reply, dict) else None
    if not isinstance(value, float | int) or not 0.0 < value < 1e9:
        raise Refusal(VerdictStatus.INTEGRITY, f"not a time: {value!r}")
    return float(value)
