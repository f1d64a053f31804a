"""What is expected of a solution's next output, and whether what it handed over is that.

Each `expect…` computes what the reference makes of a draw, as eager does and in fp64; `check`
compares with the last one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from verification.guards import Guard
from verification.workers.comparison import compare_outputs
from verification.workers.correctness import Expected, unsettled
from verification.workers.distributions import WIDENING, add_needles
from verification.workers.inputs import Draw, checksum, draw_inputs, resized
from verification.workers.reference import Reference, plain
from verification.workers.ring import timed_inputs
from verification.workers.worker_setup import release, shares_memory


class Expectations:
    """The last expectation of a reference."""

    def __init__(self, reference: Reference, any_values: bool) -> None:
        """`any_values`: whether inputs may be drawn from wider distributions than the problem's."""
        self._reference = reference
        self._any_values = any_values
        self._expected: tuple[str, list[Expected]] | None = None
        self._inputs: list[Any] = []

    def expect(self, draw: dict[str, Any]) -> dict[str, Any]:
        """Compute what is expected of a draw; the next `check` compares with it.

        {"skipped": why} where the reference itself does not go with this distribution.
        """
        self._expected, self._inputs = None, []
        wanted = Draw(**draw)
        if wanted.distribution in WIDENING and not self._any_values:
            return {"skipped": "an operator checks the domain of its input"}
        if wanted.distribution == "special" and self._reference.skips_zeros:
            return {"skipped": "how far NaN spreads through a product is nobody's definition"}
        self._inputs = self._drawn(draw)
        return self._expect(self._inputs, wanted.distribution)

    def expect_needles(self, seed: int) -> dict[str, Any]:
        """The same for the last draw with needles added."""
        self._expected = None
        add_needles(self._inputs, seed)
        return self._expect(self._inputs, "large")  # an operator may not be defined there either

    def expect_resized(self, draw: dict[str, Any]) -> dict[str, Any]:
        """The same at a neighbouring shape, if the problem has one."""
        self._expected = None
        inputs = resized(self._drawn(draw))
        if inputs is None:
            return {"skipped": "there is no row to leave out"}
        return self._expect(inputs, "large")

    def expect_arguments(self, draw: dict[str, Any]) -> dict[str, Any]:
        """The same for a model with other constructor arguments, if any is a float.

        Parameters stay. On return the reference is what it was.
        """
        self._expected = None
        given = list(self._reference.module.get_init_inputs())
        arguments = [v * 0.75 if isinstance(v, float) else v for v in given]
        if arguments == given:
            return {"skipped": "no constructor argument is a float"}
        try:
            with self._reference.made_with(arguments):
                expected = self._expect(self._drawn(draw), "large")
                return expected | {"arguments": plain(arguments)}
        except (RuntimeError, ValueError, TypeError) as error:
            return {"skipped": f"the reference refuses other arguments: {error!s:.200}"}

    def expect_timed(self, ring_seed: int, count: int) -> dict[str, Any]:
        """The same for timed call number `count` of the solution."""
        self._expected = None
        reference = self._reference
        inputs = timed_inputs(reference.module, reference.device, ring_seed, count)
        self._expected = reference.expected_of(inputs)
        return {}

    def _drawn(self, draw: dict[str, Any]) -> list[Any]:
        return draw_inputs(self._reference.module, self._reference.device, Draw(**draw))

    def _expect(self, inputs: list[Any], distribution: str) -> dict[str, Any]:
        reference = self._reference
        before = checksum(inputs)
        try:
            structure, expected = reference.expected_of(inputs)
        except RuntimeError as error:
            if distribution not in WIDENING or isinstance(error, torch.OutOfMemoryError):
                raise
            return {"skipped": f"the reference raises {type(error).__name__}: {error!s:.200}"}
        if distribution == "heavy":
            expected = [_among_outliers(e) if e.floating else e for e in expected]
        if distribution == "special":
            _, compiled = reference.run(reference.compiled, inputs)
            expected = [
                replace(e, unsettled=unsettled(e.eager, c), of_specials=True) if e.floating else e
                for e, c in zip(expected, compiled, strict=True)
            ]
        self._expected = (structure, expected)
        aliases = shares_memory([e.eager for e in expected], inputs)
        release(reference.device)
        return {"checksum": before, "structure": structure, "aliases": aliases}

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
        found = compare_outputs(
            (structure, outputs),
            (wanted, expected),
            self._reference.mail,
            {Guard(guard) for guard in off or ()},
        )
        release(self._reference.device)
        return found

    def forget(self) -> None:
        """Let go what is held, which may be gigabytes."""
        self._expected, self._inputs = None, []


def _among_outliers(expected: Expected) -> Expected:
    """Nothing is asked where sums overflow, in which all else is lost for eager too; and where an
    outlier comes early a plain sum rounds at its size from there on, twice as much as usual."""
    overflown = ~torch.isfinite(expected.eager)
    return replace(
        expected,
        unsettled=overflown if bool(overflown.any()) else None,
        depth=4 * expected.depth,
    )
