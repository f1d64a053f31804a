"""The reference's own process: expected values in fp64, comparison, and the two baselines.

It runs the problem's code and never a solution's. Handlers are plain methods called by name with
JSON values; tensors arrive through `verification.transport`.
"""

from __future__ import annotations

import contextlib
import copy
import os
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch._dynamo.utils import counters
from torch._inductor.output_code import CompiledFxGraph

from runtime.problem_code import load_module, make_inputs, make_model
from verification.clock import Clock, warm_up
from verification.correctness import Expected, compare
from verification.inputs import Draw, InputRing, checksum, draw_inputs, timed_inputs
from verification.screening import SCREENS, Sample
from verification.transport import Mailbox, describe, flatten_outputs
from verification.worker_setup import (
    opener,
    release,
    set_precision,
    shares_memory,
    synchronize,
)


class Compiled(Exception):
    """Raised in place of the first run of a compiled graph."""


class Reference:
    """One problem, loaded once and asked many times."""

    def __init__(self, config: dict[str, Any]) -> None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = config["compile_cache"]
        self.device: str = config["device"]
        self._mailbox = Mailbox(config["mail"], self.device) if config["mail"] else None
        set_precision(config["precision"])
        self.module: types.ModuleType = load_module(config["code"])
        self.model = make_model(self.module, self.device, config["state_seed"])
        self.compiled: Callable[..., Any] = torch.compile(self.model)
        self.example: list[Any] | None = None
        self.sample: Sample | None = None
        self._exact: torch.nn.Module | None = None
        self._clock: Clock | None = None
        self._ring: InputRing | None = None
        self._expected: tuple[Any, str, list[Expected]] | None = None

    def run(self, model: Callable[..., Any], inputs: list[Any]) -> tuple[str, list[torch.Tensor]]:
        with torch.no_grad():
            return flatten_outputs(model(*inputs))

    def set_state(self, seed: int, path: str, renew_mail: bool) -> dict[str, Any]:
        """Draw parameters and buffers from `seed`; the solution's process loads `path`."""
        if renew_mail:
            self._mail.renew()
        self.model.load_state_dict(make_model(self.module, self.device, seed).state_dict())
        self.example = self._exact = None
        torch.save(self.model.state_dict(), path)
        os.chmod(path, 0o644)
        return {"init_inputs": _plain(list(self.module.get_init_inputs()))}

    def make_example(self, seed: int) -> dict[str, Any]:
        """Inputs for `compile`, which is to leave the device alone, and room for the outputs."""
        self.example = make_inputs(self.module, self.device, seed)
        _, outputs = self.run(self.model, self.example)
        for index, output in enumerate(outputs):
            self._mail.make(index, output.nbytes)
        synchronize()
        return {}

    def compile(self) -> dict[str, Any]:
        """Compile the baseline, or read it from the cache, and stop before its first kernel.

        Seconds of work for the CPU, during which others may time. Says whether all of it came
        from the cache; if not, Inductor tries its few configurations in the first run, for which
        the caller should hold the device alone. Not covered: a model in which nothing is compiled
        just runs.
        """
        if self.example is None:
            raise RuntimeError("make_example comes first")

        def stop(*_: Any, **__: Any) -> None:
            raise Compiled

        counters["inductor"].clear()  # the warm parent has compiled too
        with contextlib.suppress(Compiled), mock.patch.object(CompiledFxGraph, "__call__", stop):
            self.run(self.compiled, self.example)
        found = counters["inductor"]
        return {"cached": found["fxgraph_cache_hit"] > 0 and not found["fxgraph_cache_miss"]}

    def first_run(self) -> dict[str, Any]:
        """Run the compiled baseline; the caller holds the device alone."""
        if self.example is None:
            raise RuntimeError("make_example comes first")
        self.run(self.compiled, self.example)
        synchronize()
        return {}

    def ping(self) -> dict[str, Any]:
        """A call as the solution's worker does it, in a process that can be believed."""
        self._clock = self._clock or Clock(self.device)
        return {"ms": self._clock.rehearse()}

    def exact_model(self) -> torch.nn.Module:
        if self._exact is None:
            self._exact = copy.deepcopy(self.model).double()
        return self._exact

    def expected_of(self, inputs: list[Any]) -> tuple[str, list[Expected]]:
        """Eager's and fp64's outputs. Raises ValueError when the two have different shapes."""
        structure, eager = self.run(self.model, inputs)
        doubled = [
            v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
            for v in inputs
        ]
        _, exact = self.run(self.exact_model(), doubled)
        if [e.shape for e in eager] != [x.shape for x in exact]:
            raise ValueError("the reference gives other shapes in fp64")
        return structure, [Expected(eager=e, exact=x) for e, x in zip(eager, exact, strict=True)]

    def expect(self, draw: dict[str, Any]) -> dict[str, Any]:
        """Compute what is expected of a draw; the next `check` compares with it."""
        self._expected = None
        inputs = draw_inputs(self.module, self.device, Draw(**draw))
        before = checksum(inputs)
        structure, expected = self.expected_of(inputs)
        self._expected = (inputs, structure, expected)
        release(self.device)
        return {"checksum": before, "structure": structure}

    def expect_timed(self, ring_seed: int, count: int) -> dict[str, Any]:
        """The same for timed call number `count` of the solution."""
        self._expected = None
        inputs = timed_inputs(self.module, self.device, ring_seed, count)
        structure, expected = self.expected_of(inputs)
        self._expected = (inputs, structure, expected)
        return {"structure": structure}

    @property
    def _mail(self) -> Mailbox:
        if self._mailbox is None:
            raise RuntimeError("this worker was started without a folder for outputs")
        return self._mailbox

    def check(self, structure: str, outputs: list[dict[str, Any]]) -> Any:
        """Compare with the last expectation, then drop it: {passed, error, budget, detail}."""
        if self._expected is None:
            raise RuntimeError("nothing is expected yet")
        _, wanted, expected = self._expected
        self._expected = None
        found = self._compare(structure, wanted, expected, outputs)
        release(self.device)
        return found

    def _compare(
        self,
        structure: str,
        wanted: str,
        expected: list[Expected],
        outputs: list[dict[str, Any]],
    ) -> Any:
        if structure != wanted:
            return _failed(f"expected {wanted}, got {structure}")
        if len(outputs) != len(expected):
            return _failed(f"expected {len(expected)} outputs, got {len(outputs)}")
        worst: dict[str, Any] | None = None
        for index, (got, output) in enumerate(zip(outputs, expected, strict=True)):
            if got != describe(output.eager):
                return _failed(f"output {index}: expected {describe(output.eager)}, got {got}")
            try:
                value = self._mail.take(index, output.eager)
            except (ValueError, OSError) as error:  # anything else is our own fault
                return _failed(f"output {index}: {error}")
            found = compare(value, output)
            result = {
                "passed": found.passed,
                "error": found.error,
                "budget": found.budget,
                "detail": f"output {index}: {found.detail}" if found.detail else "",
            }
            if not found.passed:
                return result
            if worst is None or (found.error or 0.0) > (worst["error"] or 0.0):
                worst = result
        return worst

    def aliases(self) -> dict[str, Any]:
        """Whether the reference itself returns memory of its inputs."""
        if self._expected is None:
            raise RuntimeError("nothing is expected yet")
        inputs, _, expected = self._expected
        return {"aliases": shares_memory([e.eager for e in expected], inputs)}

    def make_ring(self, seed: int) -> dict[str, Any]:
        """Make the inputs of the timed calls."""
        self._expected = None
        self._exact = None
        self._ring = None
        release(self.device)
        self._ring = InputRing(self.module, self.device, seed)
        synchronize()
        return {}

    def warm_up(self) -> dict[str, Any]:
        """Run both baselines until caches and allocator are warm."""
        if self._ring is None:
            raise RuntimeError("make_ring comes first")
        self._clock = self._clock or Clock(self.device)
        ring = self._ring
        for model in (self.model, self.compiled):
            warm_up(lambda m=model: self.run(m, ring.advance()))  # type: ignore[misc]
        return {"clock": self._clock.name}

    def time(self, side: str, calls: int) -> list[float]:
        """Milliseconds of each of `calls` calls of a baseline, `eager` or `compile`.

        One more call goes before them, untimed: whoever ran last left cold caches and sleeping
        threads, and not every side has the same predecessor.
        """
        if self._clock is None or self._ring is None:
            raise RuntimeError("warm_up comes first")
        model = self.model if side == "eager" else self.compiled
        samples = []
        for _ in range(calls + 1):
            inputs = self._ring.advance()
            self._clock.prepare()
            # Only the time is kept: an output that lives on would make the next call allocate anew.
            samples.append(self._clock.time(lambda i=inputs: self.run(model, i))[0])  # type: ignore[misc]
        return samples[1:]

    def stop_timing(self) -> dict[str, Any]:
        self._ring = None
        release(self.device)
        return {}


def _failed(detail: str) -> dict[str, Any]:
    return {"passed": False, "error": None, "budget": None, "detail": detail}


def _plain(values: list[Any]) -> list[Any]:
    """Constructor arguments as JSON values. Raises TypeError for anything else."""
    for value in values:
        if isinstance(value, list | tuple):
            _plain(list(value))
        elif not isinstance(value, int | float | bool | str | type(None)):
            raise TypeError(
                "get_init_inputs() must give numbers, strings, booleans, None or lists of them, "
                f"got {type(value).__name__}"
            )
    return [list(v) if isinstance(v, tuple) else v for v in values]


def handlers(config: dict[str, Any], isolation: dict[str, bool]) -> dict[str, Callable[..., Any]]:
    """The entry point of a reference worker; the problem is loaded by `load`, so that its errors
    are replies."""
    state: dict[str, Reference] = {}

    def load() -> dict[str, Any]:
        state["reference"] = Reference(config)
        return {}

    def method(name: str) -> Callable[..., Any]:
        return lambda **params: getattr(state["reference"], name)(**params)

    names = (
        "set_state",
        "make_example",
        "compile",
        "first_run",
        "ping",
        "expect",
        "expect_timed",
        "check",
        "aliases",
    )
    timing = ("make_ring", "warm_up", "time", "stop_timing")
    screens = {
        name: (lambda f: lambda **params: f(state["reference"], **params))(function)
        for name, function in SCREENS.items()
    }
    return {
        "open": opener(config, isolation),
        "load": load,
        **{name: method(name) for name in (*names, *timing)},
        **screens,
    }
