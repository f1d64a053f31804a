"""The reference's own process: expected values in fp64, comparison, and the two baselines.

It runs the problem's code and never a solution's. Handlers are plain methods called by name with
JSON values; tensors arrive through `verification.workers.transport`.
"""

from __future__ import annotations

import contextlib
import copy
import os
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch._dynamo.utils import counters
from torch._inductor.output_code import CompiledFxGraph

from runtime.problem_code import load_module, make_inputs, make_model
from verification.guards import Guard
from verification.workers.clock import Clock, warm_up
from verification.workers.correctness import Expected, compare, unsettled
from verification.workers.inputs import (
    WIDENING,
    Draw,
    InputRing,
    add_needles,
    checksum,
    draw_inputs,
    resized,
    timed_inputs,
    widens,
)
from verification.workers.screening import SCREENS, Sample
from verification.workers.transport import Mailbox, describe, flatten_outputs
from verification.workers.worker_setup import (
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
        self._widens = widens(config["code"])
        self.module: types.ModuleType = load_module(config["code"])
        self.model = make_model(self.module, self.device, config["state_seed"])
        self.compiled: Callable[..., Any] = torch.compile(self.model)
        self.example: list[Any] | None = None
        self.sample: Sample | None = None
        self._exact: torch.nn.Module | None = None
        self._clock: Clock | None = None
        self._ring: InputRing | None = None
        self._expected: tuple[str, list[Expected]] | None = None
        self._inputs: list[Any] = []
        self._copy: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])

    def run(self, model: Callable[..., Any], inputs: list[Any]) -> tuple[str, list[torch.Tensor]]:
        with torch.no_grad():
            return flatten_outputs(model(*inputs))

    def set_state(
        self, seed: int, path: str, renew_mail: bool = False, redraw: bool = True
    ) -> dict[str, Any]:
        """Draw parameters and buffers from `seed`; the solution's process loads `path`."""
        if renew_mail:
            self._mail.renew()
        state = make_model(self.module, self.device, seed, redraw).state_dict()
        self.model.load_state_dict(state)
        self.example = self._exact = None
        torch.save(self.model.state_dict(), path)
        os.chmod(path, 0o644)
        return {**self.init_inputs(), "tensors": len(state)}

    def init_inputs(self) -> dict[str, Any]:
        """The constructor arguments, as JSON."""
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
        """Compute what is expected of a draw; the next `check` compares with it.

        {"skipped": why} where the reference itself does not go with this distribution.
        """
        self._expected, self._inputs = None, []
        wanted = Draw(**draw)
        if wanted.distribution in WIDENING and not self._widens:
            return {"skipped": "an operator checks the domain of its input"}
        self._inputs = draw_inputs(self.module, self.device, wanted)
        return self._expect(self._inputs, wanted.distribution)

    def expect_needles(self, seed: int) -> dict[str, Any]:
        """The same for the last draw with needles added."""
        self._expected = None
        add_needles(self._inputs, seed)
        return self._expect(self._inputs, "large")  # an operator may not be defined there either

    def expect_resized(self, draw: dict[str, Any]) -> dict[str, Any]:
        """The same at a neighbouring shape, if the problem has one."""
        self._expected = None
        inputs = resized(draw_inputs(self.module, self.device, Draw(**draw)))
        if inputs is None:
            return {"skipped": "there is no row to leave out"}
        return self._expect(inputs, "large")

    def expect_arguments(self, draw: dict[str, Any]) -> dict[str, Any]:
        """The same for a model with other constructor arguments, if any is a float.

        Parameters stay. On return this reference is what it was.
        """
        self._expected = None
        given = list(self.module.get_init_inputs())
        arguments = [v * 0.75 if isinstance(v, float) else v for v in given]
        if arguments == given:
            return {"skipped": "no constructor argument is a float"}
        kept, kept_exact = self.model, self._exact
        try:
            with torch.device(self.device):
                self.model = self.module.Model(*arguments).eval()
            self.model.load_state_dict(kept.state_dict())
            self._exact = None
            inputs = draw_inputs(self.module, self.device, Draw(**draw))
            return self._expect(inputs, "large") | {"arguments": _plain(arguments)}
        except (RuntimeError, ValueError, TypeError) as error:
            return {"skipped": f"the reference refuses other arguments: {error!s:.200}"}
        finally:
            self.model, self._exact = kept, kept_exact

    def _expect(self, inputs: list[Any], distribution: str) -> dict[str, Any]:
        before = checksum(inputs)
        try:
            structure, expected = self.expected_of(inputs)
        except RuntimeError as error:
            if distribution not in WIDENING or isinstance(error, torch.OutOfMemoryError):
                raise
            return {"skipped": f"the reference raises {type(error).__name__}: {error!s:.200}"}
        if distribution == "special":
            _, compiled = self.run(self.compiled, inputs)
            expected = [
                replace(e, unsettled=unsettled(e.eager, c)) if e.floating else e
                for e, c in zip(expected, compiled, strict=True)
            ]
        self._expected = (structure, expected)
        aliases = shares_memory([e.eager for e in expected], inputs)
        release(self.device)
        return {"checksum": before, "structure": structure, "aliases": aliases}

    def expect_timed(self, ring_seed: int, count: int) -> dict[str, Any]:
        """The same for timed call number `count` of the solution."""
        self._expected = None
        inputs = timed_inputs(self.module, self.device, ring_seed, count)
        self._expected = self.expected_of(inputs)
        return {}

    @property
    def _mail(self) -> Mailbox:
        if self._mailbox is None:
            raise RuntimeError("this worker was started without a folder for outputs")
        return self._mailbox

    def check(
        self,
        structure: str,
        outputs: list[dict[str, Any]],
        off: list[str] | None = None,
        again: bool = False,
    ) -> Any:
        """Compare with the last expectation: {passed, error, budget, detail, guard}.

        `off`: guards that are not asked. The expectation is dropped unless it is needed `again`.
        """
        if self._expected is None:
            raise RuntimeError("nothing is expected yet")
        wanted, expected = self._expected
        if not again:
            self._expected = None
        found = self._compare(structure, wanted, expected, outputs, {Guard(g) for g in off or ()})
        release(self.device)
        return found

    def _compare(
        self,
        structure: str,
        wanted: str,
        expected: list[Expected],
        outputs: list[dict[str, Any]],
        off: set[Guard],
    ) -> Any:
        loose = Guard.STRUCTURE in off
        if structure != wanted and not loose:
            return _failed(f"expected {wanted}, got {structure}")
        if len(outputs) != len(expected) and not loose:
            return _failed(f"expected {len(expected)} outputs, got {len(outputs)}")
        worst: dict[str, Any] | None = None
        for index, (got, output) in enumerate(zip(outputs, expected, strict=not loose)):
            like, problem = _described(got, output.eager, off)
            if problem is not None:
                return problem | {"detail": f"output {index}: {problem['detail']}"}
            try:
                value = self._mail.take(index, like).to(output.eager.dtype)
            except (ValueError, OSError) as error:  # anything else is our own fault
                return _failed(f"output {index}: {error}")
            found = compare(value, output, off)
            result = {
                "passed": found.passed,
                "error": found.error,
                "budget": found.budget,
                "detail": f"output {index}: {found.detail}" if found.detail else "",
                "guard": str(found.guard),
            }
            if not found.passed:
                return result
            if worst is None or (found.error or 0.0) > (worst["error"] or 0.0):
                worst = result
        return worst if worst is not None else _failed("nothing was handed over")

    def make_ring(self, seed: int) -> dict[str, Any]:
        """Make the inputs of the timed calls."""
        self._expected = self._exact = self._ring = None
        self._inputs = []
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
        _, outputs = self.run(self.model, ring.advance())
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
        model, inputs = self._baseline(side), self._inputs
        return {"ms": self._clock.time(lambda: self.run(model, inputs), not bare)[0]}

    def _baseline(self, side: str) -> Callable[..., Any]:
        return self.model if side == "eager" else self.compiled

    def time(self, side: str, calls: int) -> list[float]:
        """Milliseconds of each of `calls` calls of a baseline, `eager` or `compile`.

        One more call goes before them, untimed: whoever ran last left cold caches and sleeping
        threads, and not every side has the same predecessor.
        """
        if self._clock is None or self._ring is None:
            raise RuntimeError("warm_up comes first")
        model = self._baseline(side)
        samples = []
        for _ in range(calls + 1):
            inputs = self._ring.advance()
            self._clock.prepare()
            # Only the time is kept: an output that lives on would make the next call allocate anew.
            samples.append(self._clock.time(lambda i=inputs: self.run(model, i))[0])  # type: ignore[misc]
        return samples[1:]

    def stop_timing(self) -> dict[str, Any]:
        self._ring, self._inputs, self._copy = None, [], ([], [])
        release(self.device)
        return {}


def _described(
    got: Any, wanted: torch.Tensor, off: set[Guard]
) -> tuple[torch.Tensor, dict[str, Any] | None]:
    """A tensor like the one that was handed over, and what is wrong about its description."""
    expected = describe(wanted)
    if not isinstance(got, dict):
        return wanted, _failed(f"expected {expected}, got {got!r:.200}")
    for keys, guard in ((("shape", "dtype"), Guard.STRUCTURE), (("contiguous",), Guard.STRIDES)):
        # A solution may be contiguous where the reference is not.
        same = all(got.get(k) == expected[k] or (k == "contiguous" and got.get(k)) for k in keys)
        if not same and guard not in off:
            return wanted, _failed(f"expected {expected}, got {got!r:.200}", guard)
    dtype = getattr(torch, str(got.get("dtype")), None)
    if Guard.STRUCTURE in off and isinstance(dtype, torch.dtype):
        return torch.empty_like(wanted, dtype=dtype), None
    return wanted, None


def _failed(detail: str, guard: Guard = Guard.STRUCTURE) -> dict[str, Any]:
    return {
        "passed": False,
        "error": None,
        "budget": None,
        "detail": detail,
        "guard": str(guard),
    }


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
        "init_inputs",
        "make_example",
        "compile",
        "first_run",
        "expect",
        "expect_needles",
        "expect_resized",
        "expect_arguments",
        "expect_timed",
        "check",
    )
    timing = (
        "make_ring",
        "warm_up",
        "flush",
        "rehearse_keep",
        "prepare",
        "call",
        "time",
        "stop_timing",
    )
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
