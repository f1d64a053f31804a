"""The reference's own process: expected values in fp64, comparison, and the two baselines.

It runs the problem's code and never a solution's. Handlers are plain methods called by name with
JSON values; tensors arrive through `verification.workers.transport`.

    reference.py      the problem, loaded: eager, compiled, fp64
    expectations.py   what is expected of an output; comparison.py whether it is that
    baselines.py      the times of eager and torch.compile
    screening.py      admission's rules
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verification.workers.baselines import Baselines
from verification.workers.distributions import widens
from verification.workers.expectations import Expectations
from verification.workers.reference import Reference
from verification.workers.screening import SCREENS
from verification.workers.worker_setup import opener

OF_THE_REFERENCE = (
    "set_state",
    "needle_state",
    "constructed_state",
    "init_inputs",
    "make_example",
    "compile",
    "first_run",
)
OF_THE_EXPECTATIONS = (
    "expect", "expect_needles", "expect_resized", "expect_arguments", "expect_timed", "check",
)  # fmt: skip
OF_THE_BASELINES = (
    "warm_up", "flush", "rehearse_keep", "prepare", "call", "time", "stop_timing",
)  # fmt: skip


class Loaded:
    """One problem with everything that is asked about it."""

    def __init__(self, config: dict[str, Any]) -> None:
        any_values = widens(config["code"])  # as it was given to us, before it runs
        self.reference = Reference(config)
        self.expectations = Expectations(self.reference, any_values)
        self.baselines = Baselines(self.reference)

    def make_ring(self, seed: int) -> dict[str, Any]:
        """Make the inputs of the timed calls, in the room of what only the checks needed."""
        self.expectations.forget()
        self.reference.drop_exact()
        return self.baselines.make_ring(seed)


def handlers(config: dict[str, Any], isolation: dict[str, bool]) -> dict[str, Callable[..., Any]]:
    """The entry point of a reference worker; the problem is loaded by `load`, so that its errors
    are replies."""
    state: dict[str, Loaded] = {}

    def load() -> dict[str, Any]:
        state["loaded"] = Loaded(config)
        return {}

    def method(part: str, name: str) -> Callable[..., Any]:
        return lambda **params: getattr(getattr(state["loaded"], part), name)(**params)

    def screen(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda **params: function(state["loaded"].reference, **params)

    return {
        "open": opener(config, isolation),
        "load": load,
        "make_ring": lambda **params: state["loaded"].make_ring(**params),
        **{name: method("reference", name) for name in OF_THE_REFERENCE},
        **{name: method("expectations", name) for name in OF_THE_EXPECTATIONS},
        **{name: method("baselines", name) for name in OF_THE_BASELINES},
        **{name: screen(function) for name, function in SCREENS.items()},
    }
