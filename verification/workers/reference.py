"""The reference: a problem's model with its parameters, as eager, as compiled and in fp64.

It is loaded once and asked many times, by admission's rules (`screening`), for what is expected of
a solution (`expectations`) and for the baselines' times (`baselines`).
"""

from __future__ import annotations

import contextlib
import copy
import os
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._dynamo.utils import counters
from torch._inductor.output_code import CompiledFxGraph

from runtime.problem_code import load_module, make_inputs, make_model
from verification.workers.correctness import Expected, NotInFp64
from verification.workers.depth import Depth
from verification.workers.distributions import STATE_NEEDLE_SIZE, STATE_NEEDLES, add_needles
from verification.workers.screening import Sample
from verification.workers.transport import Mailbox, flatten_outputs
from verification.workers.worker_setup import set_precision, synchronize


class Compiled(Exception):
    """Raised in place of the first run of a compiled graph."""


class Reference:
    """One problem, loaded."""

    def __init__(self, config: dict[str, Any]) -> None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = config["compile_cache"]
        self.device: str = config["device"]
        self._mailbox = Mailbox(config["mail"], self.device) if config["mail"] else None
        set_precision(config["precision"])
        self.code: str = config["code"]
        self.module: types.ModuleType = load_module(self.code)
        self.model = make_model(self.module, self.device, config["state_seed"])
        self.compiled: Callable[..., Any] = torch.compile(self.model)
        self.example: list[Any] | None = None
        self.sample: Sample | None = None
        self._exact: torch.nn.Module | None = None
        self.depth, self.skips_zeros = 0, False
        """As `Depth` has it; known from `make_example` on."""

    @property
    def mail(self) -> Mailbox:
        """Where a solution's outputs arrive."""
        if self._mailbox is None:
            raise RuntimeError("this worker was started without a folder for outputs")
        return self._mailbox

    def run(self, model: Callable[..., Any], inputs: list[Any]) -> tuple[str, list[torch.Tensor]]:
        with torch.no_grad():
            return flatten_outputs(model(*inputs))

    def set_state(
        self, seed: int, path: str, renew_mail: bool = False, redraw: bool = True
    ) -> dict[str, Any]:
        """Draw parameters and buffers from `seed`; the solution's process loads `path`."""
        if renew_mail:
            self.mail.renew()
        state = make_model(self.module, self.device, seed, redraw).state_dict()
        self.model.load_state_dict(state)
        self.example = None
        self._hand_out_state(path)
        return {**self.init_inputs(), "tensors": len(state)}

    def needle_state(self, seed: int, path: str) -> dict[str, Any]:
        """Change a few elements of every parameter and floating buffer, which are what is drawn at
        random; the solution's process loads `path`."""
        state = [v for v in self.model.state_dict().values() if v.is_floating_point()]
        add_needles(state, seed, STATE_NEEDLE_SIZE, STATE_NEEDLES)
        self._hand_out_state(path)
        return {"tensors": len(state)}

    def constructed_state(self, seed: int, path: str) -> dict[str, Any]:
        """Write to `path` what the constructor makes of `seed`, from which the solution's process
        finds out which of its own parameters is which; the parameters in use stay."""
        made = make_model(self.module, self.device, seed, redraw=False)
        torch.save(made.state_dict(keep_vars=True), path)
        os.chmod(path, 0o644)
        return {}

    def _hand_out_state(self, path: str) -> None:
        self.drop_exact()
        torch.save(self.model.state_dict(), path)
        os.chmod(path, 0o644)

    def init_inputs(self) -> dict[str, Any]:
        """The constructor arguments, as JSON."""
        return {"init_inputs": plain(list(self.module.get_init_inputs()))}

    @contextlib.contextmanager
    def made_with(self, arguments: list[Any]) -> Iterator[None]:
        """Be the model of other constructor arguments meanwhile; parameters stay."""
        kept, kept_exact = self.model, self._exact
        try:
            with torch.device(self.device):
                self.model = self.module.Model(*arguments).eval()
            self.model.load_state_dict(kept.state_dict())
            self._exact = None
            yield
        finally:
            self.model, self._exact = kept, kept_exact

    def make_example(self, seed: int) -> dict[str, Any]:
        """Inputs for `compile`, which is to leave the device alone, and room for the outputs."""
        self.example = make_inputs(self.module, self.device, seed)
        with Depth() as depth:
            _, outputs = self.run(self.model, self.example)
        self.depth, self.skips_zeros = depth.most, depth.skips_zeros
        for index, output in enumerate(outputs):
            self.mail.make(index, output.nbytes)
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

    def expected_of(self, inputs: list[Any]) -> tuple[str, list[Expected]]:
        """Eager's and fp64's outputs. Raises NotInFp64, and ValueError when the two have different
        shapes."""
        structure, eager = self.run(self.model, inputs)
        try:
            with _fp64_by_default():
                _, exact = self.run(self._exact_model(), [_doubled(value) for value in inputs])
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError) as error:
            raise NotInFp64(f"fp64 cannot be computed: {error!s:.300}") from error
        if [e.shape for e in eager] != [x.shape for x in exact]:
            raise ValueError("the reference gives other shapes in fp64")
        return structure, [
            Expected(eager=e, exact=x, depth=self.depth) for e, x in zip(eager, exact, strict=True)
        ]

    def _exact_model(self) -> torch.nn.Module:
        if self._exact is None:
            self._exact = copy.deepcopy(self.model).double()
        return self._exact

    def drop_exact(self) -> None:
        """Let the model in fp64 go, which is made again when it is needed."""
        self._exact = None


@contextlib.contextmanager
def _fp64_by_default() -> Iterator[None]:
    """So that tensors which a model makes as it runs are of its inputs' type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _doubled(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_complex():
        return value.to(torch.complex128)
    return value.double() if value.is_floating_point() else value


def plain(values: list[Any]) -> list[Any]:
    """Constructor arguments as JSON values. Raises TypeError for anything else."""
    for value in values:
        if isinstance(value, list | tuple):
            plain(list(value))
        elif not isinstance(value, int | float | bool | str | type(None)):
            raise TypeError(
                "get_init_inputs() must give numbers, strings, booleans, None or lists of them, "
                f"got {type(value).__name__}"
            )
    return [list(v) if isinstance(v, tuple) else v for v in values]
