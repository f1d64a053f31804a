"""Is an output right? Judged against fp64, with eager's own error as the yardstick.

For an output y with fp64 reference r and scale s = rms(r), the error of an element is
|y - r| / (s + |r|). Two figures count: the largest (a single wrong element must not hide) and
the root mean square (a loss of precision everywhere must not hide). A solution may have
MAX_MULTIPLE and RMS_MULTIPLE times eager's own figure in the same precision class, and never has
to be better than a few units in the last place of the output's type. So a silent downcast fails:
bf16 arithmetic in an fp32 problem is about 2**16 times eager's error.

Integers and booleans must be equal. Where eager and fp64 agree that a value is NaN or infinite, the
solution must agree too; where those two differ (an overflow fp64 does not have), the element is
skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

MAX_MULTIPLE = 8.0
RMS_MULTIPLE = 4.0
FLOOR_ULPS = {torch.float32: 16.0, torch.bfloat16: 2.0, torch.float16: 4.0, torch.float64: 64.0}
TINY = 1e-30
CHUNK = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Expected:
    """One output tensor of the reference: in its class (`eager`) and in fp64 (`exact`)."""

    eager: torch.Tensor
    exact: torch.Tensor

    @property
    def floating(self) -> bool:
        return self.eager.is_floating_point()


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """`error` is the largest of the ratios error / budget, so that it passes when <= 1."""

    passed: bool
    error: float | None
    budget: float | None
    detail: str


def figures(value: torch.Tensor, exact: torch.Tensor, valid: torch.Tensor) -> tuple[float, float]:
    """(largest, root mean square) of |value - exact| / (scale + |exact|) over `valid` elements."""
    count = int(valid.sum())
    if count == 0:
        return 0.0, 0.0
    squares = sum(float(r.square().sum()) for _, r in _chunks(value, exact, valid))
    scale = (squares / count) ** 0.5 + TINY
    largest, total = 0.0, 0.0
    for got, reference in _chunks(value, exact, valid):
        relative = (got - reference).abs() / (scale + reference.abs())
        largest = max(largest, float(relative.max()))
        total += float(relative.square().sum())
    return largest, (total / count) ** 0.5


def _chunks(
    value: torch.Tensor, exact: torch.Tensor, valid: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(value, exact) in fp64 with zeros where not valid, a piece at a time: gigabytes stay put."""
    parts = (t.reshape(-1).split(CHUNK) for t in (value, exact, valid))
    for v, e, ok in zip(*parts, strict=True):
        yield torch.where(ok, v.to(torch.float64), 0.0), torch.where(ok, e, 0.0)


def compare(value: torch.Tensor, expected: Expected) -> Comparison:
    """Compare one output tensor with what is expected of it."""
    eager, exact = expected.eager, expected.exact
    if value.shape != eager.shape or value.dtype != eager.dtype:
        return _wrong(
            f"expected {tuple(eager.shape)} {eager.dtype}, got {tuple(value.shape)} {value.dtype}"
        )
    if not expected.floating:
        wrong = int((value != eager).sum())
        return _wrong(f"{wrong} of {value.numel()} elements differ") if wrong else _right(0.0, 0.0)
    mask = _same_specials(value, eager, exact)
    if isinstance(mask, str):
        return _wrong(mask)
    ulp = torch.finfo(eager.dtype).eps * FLOOR_ULPS[eager.dtype]
    eager_max, eager_rms = figures(eager, exact, mask)
    got_max, got_rms = figures(value, exact, mask)
    max_budget = max(MAX_MULTIPLE * eager_max, ulp)
    rms_budget = max(RMS_MULTIPLE * eager_rms, ulp / 4)
    if got_max <= max_budget and got_rms <= rms_budget:
        return _right(got_max, max_budget)
    detail = (
        f"largest error {got_max:.3g} (budget {max_budget:.3g}), "
        f"rms {got_rms:.3g} (budget {rms_budget:.3g}), of the output's scale"
    )
    return Comparison(passed=False, error=got_max, budget=max_budget, detail=detail)


def _same_specials(
    value: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor
) -> torch.Tensor | str:
    """The elements to compare, or what is wrong about NaNs and infinities."""
    for name, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        settled = test(eager) == test(exact)
        wrong = int((settled & (test(value) != test(eager))).sum())
        if wrong:
            return f"{wrong} elements differ in being {name}"
    return torch.isfinite(eager) & torch.isfinite(exact)


def _wrong(detail: str) -> Comparison:
    return Comparison(passed=False, error=None, budget=None, detail=detail)


def _right(error: float, budget: float) -> Comparison:
    return Comparison(passed=True, error=error, budget=budget, detail="")
