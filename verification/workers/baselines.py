"""Eager and torch.compile timed, and what surrounds a call measured in a process to be believed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from verification.workers.clock import Clock, warm_up
from verification.workers.reference import Reference
from verification.workers.ring import InputRing
from verification.workers.worker_setup import release, synchronize


class Baselines:
    """The two baselines of a reference, and the inputs of their timed calls."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._clock: Clock | None = None
        self._ring: InputRing | None = None
        self._inputs: list[Any] = []
        self._copy: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])

    def make_ring(self, seed: int) -> dict[str, Any]:
        """Make the inputs of the timed calls."""
        self._ring, self._inputs = None, []  # before there is a second one
        release(self._reference.device)
        self._ring = InputRing(self._reference.module, self._reference.device, seed)
        synchronize()
        return {}

    def warm_up(self) -> dict[str, Any]:
        """Run both baselines until caches and allocator are warm."""
        if self._ring is None:
            raise RuntimeError("make_ring comes first")
        reference, ring = self._reference, self._ring
        self._clock = self._clock or Clock(reference.device)
        for model in (reference.model, reference.compiled):
            warm_up(lambda m=model: reference.run(m, ring.advance()))  # type: ignore[misc]
        _, outputs = reference.run(reference.model, ring.advance())
        self._copy = ([torch.zeros_like(output) for output in outputs], outputs)
        synchronize()
        return {"clock": self._clock.name}

    def flush(self) -> dict[str, Any]:
        """Empty the device's caches, which all processes share, where nobody can leave it out."""
        if self._clock is None:
            raise RuntimeError("warm_up comes first")
        self._clock.flush()
        synchronize()
        return {}

    def rehearse_keep(self) -> dict[str, Any]:
        """What `keep` does in the solution's process, in one that can be believed."""
        for room, output in zip(*self._copy, strict=True):
            room.copy_(output)
        synchronize()
        return {}

    def prepare(self) -> dict[str, Any]:
        """New values in the inputs, as the solution's process does it before a timed call."""
        if self._clock is None or self._ring is None:
            raise RuntimeError("warm_up comes first")
        self._inputs = self._ring.advance()
        self._clock.prepare()
        return {}

    def call(self, side: str, bare: bool) -> dict[str, Any]:
        """One call of a baseline, as the solution's process makes one; for the judge's clock."""
        if self._clock is None:
            raise RuntimeError("prepare comes first")
        reference, model, inputs = self._reference, self._model(side), self._inputs
        return {"ms": self._clock.time(lambda: reference.run(model, inputs), not bare)[0]}

    def _model(self, side: str) -> Callable[..., Any]:
        return self._reference.model if side == "eager" else self._reference.compiled

    def time(self, side: str, calls: int) -> list[float]:
        """Milliseconds of each of `calls` calls of a baseline, `eager` or `compile`.

        One more call goes before them, untimed: whoever ran last left cold caches and sleeping
        threads, and not every side has the same predecessor.
        """
        if self._clock is None or self._ring is None:
            raise RuntimeError("warm_up comes first")
        run, model = self._reference.run, self._model(side)
        samples = []
        for _ in range(calls + 1):
            inputs = self._ring.advance()
            self._clock.prepare()
            # Only the time is kept: an output that lives on would make the next call allocate anew.
            samples.append(self._clock.time(lambda i=inputs: run(model, i))[0])  # type: ignore[misc]
        return samples[1:]

    def stop_timing(self) -> dict[str, Any]:
        self._ring, self._inputs, self._copy = None, [], ([], [])
        release(self._reference.device)
        return {}
