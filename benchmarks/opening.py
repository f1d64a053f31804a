"""What processes that open a GPU, or die on it, cost a timing that is going on beside them.

    python -m benchmarks.opening --json=FILE

One process times a kernel over and over, by the device's clock and by its own, while others make a
context, and later are killed with a gigabyte of device memory each. Also how long a context takes
to make, alone and with others.

The kernel asks the driver for nothing, so this shows what the device does to a timing, and only in
the longest times by the process's clock what the driver does: a call that asks for memory while a
context is in the making waits for it. That is why a worker opens its device under the lease.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from training_export.run_record import git_commit

ELEMENTS, FLUSH_BYTES, HELD_BYTES = 16 << 20, 256 << 20, 1 << 30
PHASE_S = 3.0
OPENERS = 12
TOGETHER = (1, 2, 4, 12)
Row = tuple[float, float, float]
"""Moment (seconds since the epoch), milliseconds on the device's clock, and on the process's."""

_forked = mp.get_context("fork")  # the parent never asks for a device


def time_kernel(file: str, warm: Any, stop: Any) -> None:
    """Time `x + 1` behind a flush of the caches until told to stop; `warm` after a thousand."""
    x = torch.randn(ELEMENTS, device="cuda")
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    rows: list[Row] = []
    while not stop.is_set():
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        moment, started = time.time(), time.perf_counter()
        flush.zero_()
        begin.record()
        y = x + 1
        end.record()
        torch.cuda.synchronize()
        wall_ms = (time.perf_counter() - started) * 1e3
        rows.append((moment, begin.elapsed_time(end), wall_ms))
        del y
        if len(rows) == 1000:
            warm.set()
    Path(file).write_text(json.dumps(rows))


def open_device(go: Any, opened: Any, seconds: Any, hold_bytes: int) -> None:
    """Make a context when told to, then hold some memory until killed."""
    go.wait()
    started = time.perf_counter()
    torch.empty(1, device="cuda")
    torch.cuda.synchronize()
    seconds.put(time.perf_counter() - started)
    opened.wait()
    held = torch.zeros(hold_bytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    seconds.put(float(held[0]))
    time.sleep(3600)


class Openers:
    """Processes that open the device on a word and die on another."""

    def __init__(self, number: int) -> None:
        self._opened, self._seconds = _forked.Event(), _forked.Queue()
        self._go = [_forked.Event() for _ in range(number)]
        self._processes = [
            _forked.Process(
                target=open_device,
                args=(go, self._opened, self._seconds, HELD_BYTES),
                daemon=True,
            )
            for go in self._go
        ]
        for process in self._processes:
            process.start()
        time.sleep(0.5)

    def open(self, pause_s: float) -> list[float]:
        """Seconds each took."""
        for go in self._go:
            go.set()
            time.sleep(pause_s)
        return [self._seconds.get(timeout=60) for _ in self._go]

    def hold(self) -> None:
        self._opened.set()
        for _ in self._go:
            self._seconds.get(timeout=60)

    def die(self, pause_s: float) -> None:
        for process in self._processes:
            process.kill()
            process.join()
            time.sleep(pause_s)


@contextmanager
def timing() -> Iterator[Callable[[], list[Row]]]:
    """A process that times a kernel; the function ends it and gives its rows."""
    with tempfile.TemporaryDirectory() as folder:
        file, warm, stop = os.path.join(folder, "rows"), _forked.Event(), _forked.Event()
        process = _forked.Process(target=time_kernel, args=(file, warm, stop), daemon=True)
        process.start()
        if not warm.wait(60):
            raise TimeoutError("the kernel was not timed a thousand times within 60 s")

        def rows() -> list[Row]:
            stop.set()
            process.join(60)
            return [(a, b, c) for a, b, c in json.loads(Path(file).read_text())]

        yield rows


def summary(rows: list[Row], span: tuple[float, float]) -> dict[str, Any]:
    """Percentiles of the rows of a phase, in ms."""
    found: dict[str, Any] = {}
    within = [row for row in rows if span[0] <= row[0] < span[1]]
    for column, name in ((1, "device"), (2, "wall")):
        values = sorted(row[column] for row in within)
        cuts = {f"p{q}": values[len(values) * q // 100] for q in (10, 50, 90, 99)}
        found[f"{name}_ms"] = {**cuts, "max": values[-1]}
    return {"timings": len(within), **found}


def measure() -> dict[str, Any]:
    """Phases beside a timing, then contexts made together."""
    spans: dict[str, tuple[float, float]] = {}

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        started = time.time()
        yield
        spans[name] = (started, time.time())

    openers = Openers(OPENERS)
    with timing() as finish:
        with phase("quiet"):
            time.sleep(PHASE_S)
        with phase("contexts are made"):
            openers.open(PHASE_S / OPENERS)
        openers.hold()
        with phase("processes die"):
            openers.die(PHASE_S / OPENERS)
        with phase("quiet again"):
            time.sleep(PHASE_S)
        rows = finish()
    together = {}
    for number in TOGETHER:
        several = Openers(number)
        together[number] = several.open(0.0)
        several.die(0.0)
    return {
        "phases": {name: summary(rows, span) for name, span in spans.items()},
        "seconds_to_open_together": together,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--json")
    args = parser.parse_args()
    found = measure()
    for name, phase in found["phases"].items():
        print(f"{name:18s} {phase['timings']:6d} timings", phase["device_ms"], phase["wall_ms"])
    for number, seconds in found["seconds_to_open_together"].items():
        print(
            f"{number:2d} at once: {statistics.mean(seconds):.3f} s each, {max(seconds):.3f} s all"
        )
    if args.json:
        head = {
            "commit": git_commit(str(Path(__file__).resolve().parent.parent)),
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
        }
        Path(args.json).write_text(json.dumps(head | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
