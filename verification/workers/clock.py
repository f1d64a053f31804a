"""Timing one call inside a worker: the same code for baselines and for solutions."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

FLUSH_BYTES, FLUSHES = 256 << 20, 4
"""Written before every timed call on a GPU: four times the largest L2 cache in use (60 MB). Four
times, about 0.27 ms, because the call is launched meanwhile: with 0.13 ms what torch.compile takes
for a launch beside eleven busy processes was in one time of five (docs/log.md)."""

WARM_UP_CALLS, WARM_UP_S = 10, 0.05
"""Calls before timing: ten, or as many as fit, but at least three."""


def warm_up(call: Callable[[], Any]) -> int:
    """Run `call` until caches, clocks and allocator are warm; says how often."""
    started, count = time.perf_counter(), 0
    while count < 3 or (count < WARM_UP_CALLS and time.perf_counter() - started < WARM_UP_S):
        call()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        count += 1
    return count


class Clock:
    """CUDA events on a GPU, `perf_counter` on a CPU; caches are cold before each call."""

    def __init__(self, device: str) -> None:
        self.cuda = device.startswith("cuda")
        self.name = "cuda_event" if self.cuda else "perf_counter"
        if self.cuda:
            self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def prepare(self) -> None:
        """An idle device. Called before the judge starts its own clock."""
        if self.cuda:
            torch.cuda.synchronize()

    def flush(self) -> None:
        """Queue writes of several times the caches' size; on a CPU the caches stay as they are."""
        if self.cuda:
            for _ in range(FLUSHES):
                self._flush.fill_(0)

    def time(self, call: Callable[[], Any], hidden: bool = True) -> tuple[float, Any]:
        """(milliseconds, result) of one call; on return the whole device is idle.

        On a GPU the call queues behind the flush, as in Triton's `do_bench`: while that runs the
        call is launched, so that what is timed is the device's work. Launched to an idle device it
        would be the launch too, 0.05 to 0.15 ms that vary with whatever else the CPU does. Without
        `hidden` nothing is queued before the call, so that there is nothing of ours to leave out.

        Work on another stream escapes the events, not the judge's own clock around this call. Not
        covered: on a stream of higher priority it can begin beside the flush, at most as long as
        that takes; it gains by that what does not need the memory that the flush keeps busy.
        """
        if not self.cuda:
            start = time.perf_counter()
            result = call()
            return (time.perf_counter() - start) * 1e3, result
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if hidden:
            self.flush()
        first.record()
        result = call()
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last), result
