"""The solution's process: unprivileged, offline, and believed only where that costs the solution.

It gets inputs by seed, parameters by file and the library the judge built. What it says about
time is checked against the judge's own clock, what it says about correctness is not asked:
outputs are read and judged elsewhere.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from runtime import cabi
from verification.clock import Clock, warm_up
from verification.inputs import Draw, InputRing, checksum, draw_inputs
from verification.transport import Mailbox, flatten_outputs
from verification.worker_setup import (
    opener,
    release,
    set_precision,
    shares_memory,
    synchronize,
)


class Candidate:
    """A solution being asked for outputs."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.device: str = config["device"]
        self.scratch = Path(config["scratch"])
        self._mailbox = Mailbox(config["mail"], self.device)
        set_precision(config["precision"])
        self.module = _inputs_module(config["inputs_code"])
        self._clock = Clock(self.device)
        self._alive: list[tuple[str, list[torch.Tensor]]] = []
        self._ring: InputRing | None = None
        self._inputs: Any = None
        self._result: Any = None
        self._kept: dict[int, tuple[str, list[torch.Tensor]]] = {}

    def ping(self) -> dict[str, Any]:
        """A call as `call` does it, with work that is ours: what goes on around the work?"""
        return {"ms": self._clock.rehearse()}

    def build_model(self, library: str, state: str, init_inputs: list[Any]) -> dict[str, Any]:
        """Import `model_new.py`, construct `ModelNew` and give it the reference's parameters."""
        cabi.bind(library)
        sys.modules["cabi"] = cabi
        sys.path.insert(0, str(self.scratch))
        path = self.scratch / "model_new.py"
        spec = importlib.util.spec_from_file_location("model_new", path)
        if spec is None or spec.loader is None:
            raise ImportError(f"cannot import {path}")
        module = importlib.util.module_from_spec(spec)
        sys.modules["model_new"] = module
        spec.loader.exec_module(module)
        with torch.device(self.device):
            model = module.ModelNew(*init_inputs).eval()
        weights = torch.load(state, map_location=self.device, weights_only=True)
        model.load_state_dict(weights, strict=True)
        self.model = model.to(self.device)
        synchronize()
        return {}

    def _forward(self, inputs: list[Any]) -> Any:
        with torch.no_grad():
            return self.model(*inputs)

    def run(self, draw: dict[str, Any]) -> dict[str, Any]:
        """One checked call. The outputs stay alive, so that a reused buffer shows at the end."""
        inputs = draw_inputs(self.module, self.device, Draw(**draw))
        before = checksum(inputs)
        self._poison()
        structure, outputs = flatten_outputs(self._forward(inputs))
        if self._clock.cuda:
            torch.cuda.synchronize()
        self._alive.append((checksum(list(outputs)), outputs))
        return {
            "checksum": before,
            "inputs_kept": checksum(inputs) == before,
            "aliases": shares_memory(outputs, inputs),
            **self._send(structure, outputs),
        }

    def _poison(self) -> None:
        """Fill what the allocator is about to hand out with NaN, so that it cannot pass as output.

        Only on a GPU: on a CPU large blocks come from the system as zeros.
        """
        if self._clock.cuda and self._alive:
            for output in self._alive[-1][1]:
                size = output.numel() * output.element_size()
                torch.empty(size, dtype=torch.uint8, device=output.device).fill_(0xFF)

    def _send(self, structure: str, outputs: list[torch.Tensor]) -> dict[str, Any]:
        """Hand outputs to the reader, over those it has read."""
        sent = [self._mailbox.put(index, value) for index, value in enumerate(outputs)]
        return {"structure": structure, "outputs": sent}

    def alive(self) -> dict[str, Any]:
        """Whether all earlier outputs still hold what they held. Then they are let go."""
        kept = all(checksum(list(outputs)) == was for was, outputs in self._alive)
        self._alive = []
        release(self.device)
        return {"kept": kept}

    def make_ring(self, seed: int) -> dict[str, Any]:
        """Make the inputs of the timed calls."""
        self._ring = self._inputs = self._result = None  # before there is a second one
        self._kept = {}
        release(self.device)
        self._ring = InputRing(self.module, self.device, seed)
        synchronize()
        return {}

    def warm_up(self) -> dict[str, Any]:
        """Run until caches and allocator are warm; says with how many calls."""
        if self._ring is None:
            raise RuntimeError("make_ring comes first")
        ring = self._ring
        return {"calls": warm_up(lambda: self._forward(ring.advance()))}

    def prepare(self) -> dict[str, Any]:
        """New values in the inputs, before the judge starts its clock."""
        if self._ring is None:
            raise RuntimeError("make_ring comes first")
        self._result = None
        self._inputs = self._ring.advance()
        self._clock.prepare()
        return {}

    def call(self) -> dict[str, Any]:
        """One timed call."""
        milliseconds, result = self._clock.time(lambda: self._forward(self._inputs))
        self._result = result
        return {"ms": milliseconds}

    def keep(self, number: int) -> dict[str, Any]:
        """Copy the output of the last timed call, asked for after the clock has stopped.

        A copy on the device: handing it over takes a hundred times as long, and can wait until
        others may use the device again.
        """
        structure, outputs = flatten_outputs(self._result)
        self._kept[number] = (structure, [output.clone() for output in outputs])
        synchronize()
        return {}

    def hand_over(self, number: int) -> dict[str, Any]:
        """The output that was kept of a timed call."""
        self._ring = self._inputs = self._result = None
        return self._send(*self._kept.pop(number))


def _inputs_module(code: str) -> types.ModuleType:
    module = types.ModuleType("problem_inputs")
    exec(compile(code, "<problem_inputs>", "exec"), module.__dict__)
    return module


def handlers(config: dict[str, Any], isolation: dict[str, bool]) -> dict[str, Callable[..., Any]]:
    """The entry point of a solution worker."""
    os.chdir(config["scratch"])
    os.environ["HOME"] = config["scratch"]
    state: dict[str, Candidate] = {}

    def load() -> dict[str, Any]:
        state["candidate"] = Candidate(config)
        return {}

    def method(name: str) -> Callable[..., Any]:
        return lambda **params: getattr(state["candidate"], name)(**params)

    names = (
        "ping",
        "build_model",
        "run",
        "alive",
        "make_ring",
        "warm_up",
        "prepare",
        "call",
        "keep",
        "hand_over",
    )
    return {
        "open": opener(config, isolation),
        "load": load,
        **{name: method(name) for name in names},
    }
