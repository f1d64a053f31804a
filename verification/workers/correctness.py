"""Is an output right? Judged against fp64, with eager's own error as the yardstick.

For an output y with fp64 reference r and scale s = rms(r), the error of an element is
|y - r| / (s + |r|). Two figures count: the largest (a single wrong element must not hide) and
the root mean square (a loss of precision everywhere must not hide). A solution may have
MAX_MULTIPLE and RMS_MULTIPLE times eager's own figure in the same precision class, and never has
to be better than some units in the last place of the output's type. A sum of fp32 values one after
the other, as most people write it, has up to 7 times the rms error of torch's sums in blocks, and
up to 11 times the largest; of very long ones the error grows as the square root of their length
(Higham, Accuracy and Stability of Numerical Algorithms, 4.2), and may. A silent downcast fails by
far: TF32 in an fp32 problem is about 2**11 times eager's error, bf16 2**13.

Integers and booleans must be equal to eager's or fp64's. Where those two agree that a value is NaN
or infinite, the solution must agree too; where they differ (an overflow fp64 does not have), the
element is skipped, and infinity held against nobody: whoever multiplies in another order overflows
elsewhere.
Where the inputs were NaN or infinite NaN stands for infinity: arithmetic in several parts
(a compensated sum, a product split into TF32 terms) makes the one of the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from verification.guards import Guard

MAX_MULTIPLE = 16.0
RMS_MULTIPLE = 8.0
FLOOR_ULPS = {torch.float32: 64.0, torch.bfloat16: 2.0, torch.float16: 4.0, torch.float64: 64.0}
DEPTH_EPS = 1 / 6
"""The rms error of a plain sum of K terms, over the square root of K, in units of the type that is
summed up in, which is fp32 or fp64: a bound of what was seen, 0.9e-8 with 131,072 on an H200."""
TINY = 1e-30
CHUNK = 1 << 25


@dataclass(frozen=True, kw_only=True)
class Expected:
    """One output tensor of the reference: in its class (`eager`) and in fp64 (`exact`)."""

    eager: torch.Tensor
    exact: torch.Tensor
    unsettled: torch.Tensor | None = None
    """Elements of which torch.compile says other than eager whether they are NaN or infinite."""
    depth: int = 0
    """The most terms that an element is the sum of."""
    of_specials: bool = False
    """Whether the inputs had NaN and infinities."""

    @property
    def floating(self) -> bool:
        return self.eager.is_floating_point()


class NotInFp64(RuntimeError):
    """The reference runs, but not on numbers of twice the precision."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """`error` is the largest of the ratios error / budget, so that it passes when <= 1."""

    passed: bool
    error: float | None
    budget: float | None
    detail: str
    guard: Guard = Guard.BUDGET
    """What a comparison that failed fell to."""


def figures(
    values: Sequence[torch.Tensor], exact: torch.Tensor, valid: torch.Tensor | None = None
) -> list[tuple[float, float]]:
    """(largest, root mean square) of |value - exact| / (scale + |exact|) for each of `values`.

    Over the `valid` elements; None says that all are, which halves the work. The device is asked
    once, at the end: beside other processes every answer costs a turn.
    """
    count = exact.new_tensor(exact.numel()) if valid is None else valid.sum()
    if exact.numel() == 0:
        return [(0.0, 0.0)] * len(values)
    squares = torch.stack([_squares(piece) for piece in _chunks(exact, valid)]).sum()
    scale = (squares / count.clamp(min=1)).sqrt() + TINY
    found = [
        _figures(_chunks(value, valid), _chunks(exact, valid), scale, count) for value in values
    ]
    return [(largest, rms) for largest, rms in torch.stack(found).tolist()]


def _figures(
    values: Iterable[torch.Tensor],
    pieces: Iterable[torch.Tensor],
    scale: torch.Tensor,
    count: torch.Tensor,
) -> torch.Tensor:
    largest, total = torch.zeros_like(scale), torch.zeros_like(scale)
    for value, reference in zip(values, pieces, strict=True):
        relative = (value - reference).abs_().div_(reference.abs().add_(scale))
        largest = torch.maximum(largest, relative.max())
        total += _squares(relative)
    return torch.stack([largest, (total / count.clamp(min=1)).sqrt()])


def _squares(values: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(values).square()


def _chunks(values: torch.Tensor, valid: torch.Tensor | None) -> Iterator[torch.Tensor]:
    """`values` in fp64 with zeros where not valid, a piece at a time: gigabytes stay put."""
    parts = values.reshape(-1).split(CHUNK)
    if valid is None:
        yield from (part.to(torch.float64) for part in parts)
        return
    for part, ok in zip(parts, valid.reshape(-1).split(CHUNK), strict=True):
        yield torch.where(ok, part.to(torch.float64), 0.0)


def compare(
    value: torch.Tensor, expected: Expected, off: Collection[Guard] = frozenset()
) -> Comparison:
    """Compare one output tensor with what is expected of it; `off`: guards that are not asked."""
    eager, exact = expected.eager, expected.exact
    if value.shape != eager.shape or value.dtype != eager.dtype:
        return _wrong(
            f"expected {tuple(eager.shape)} {eager.dtype}, got {tuple(value.shape)} {value.dtype}",
            Guard.STRUCTURE,
        )
    if eager.is_complex():
        return compare(_as_real(value), _real(expected), off)
    if not expected.floating:
        wrong = 0 if Guard.BUDGET in off else _wrong_integers(value, expected)
        return _wrong(f"{wrong} of {value.numel()} elements differ") if wrong else _right(0.0, 0.0)
    mask = None
    if not _all_finite(value, eager, exact):
        found = _same_specials(value, expected)
        if isinstance(found, str) and Guard.SPECIALS not in off:
            return _wrong(found, Guard.SPECIALS)
        mask = torch.isfinite(value) & _comparable(expected)
    ulp = torch.finfo(eager.dtype).eps * FLOOR_ULPS[eager.dtype]
    (eager_max, eager_rms), (got_max, got_rms) = figures((eager, value), exact, mask)
    summed = torch.float64 if eager.dtype == torch.float64 else torch.float32
    floor = max(ulp, 4 * DEPTH_EPS * torch.finfo(summed).eps * expected.depth**0.5)
    max_budget = max(MAX_MULTIPLE * eager_max, floor)
    # Of few elements the root mean square is itself a draw; of one it is the largest.
    few = 1 + 3 / max(1, value.numel()) ** 0.5
    rms_budget = min(max_budget, max(RMS_MULTIPLE * eager_rms, floor / 4) * few)
    if Guard.BUDGET in off or (got_max <= max_budget and got_rms <= rms_budget):
        return _right(got_max, max_budget)
    detail = (
        f"largest error {got_max:.3g} (budget {max_budget:.3g}), "
        f"rms {got_rms:.3g} (budget {rms_budget:.3g}), of the output's scale"
    )
    return Comparison(passed=False, error=got_max, budget=max_budget, detail=detail)


def _wrong_integers(value: torch.Tensor, expected: Expected) -> int:
    """Elements that neither eager nor fp64 has, unless there are as few as the two differ in twice
    over: an index of nearly equal values is decided by rounding."""
    eager, exact = expected.eager, expected.exact
    wrong = int(((value != eager) & (value != exact)).sum())
    return wrong if wrong > 2 * int((eager != exact).sum()) else 0


def _as_real(value: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(value.resolve_conj())


def _real(expected: Expected) -> Expected:
    return replace(expected, eager=_as_real(expected.eager), exact=_as_real(expected.exact))


EXACTLY = (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf))
LOOSELY = (("finite", torch.isfinite),)


def _all_finite(*tensors: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite; a sum is finite exactly then, in fp64's range."""
    sums = torch.stack([tensor.sum(dtype=torch.float64) for tensor in tensors])
    return bool(torch.isfinite(sums).all())


def _same_specials(value: torch.Tensor, expected: Expected) -> str | None:
    """What is wrong about NaNs and infinities, where eager and fp64 agree about them."""
    eager, exact = expected.eager, expected.exact
    overflown = bool((torch.isinf(eager) & torch.isfinite(exact)).any())
    for name, test in LOOSELY if expected.of_specials else EXACTLY:
        settled = test(eager) == test(exact)
        if expected.unsettled is not None:
            settled &= ~expected.unsettled
        if overflown:
            settled &= ~torch.isinf(value)
        wrong = int((settled & (test(value) != test(eager))).sum())
        if wrong:
            return f"{wrong} elements differ in being {name}"
    return None


def _comparable(expected: Expected) -> torch.Tensor:
    """The elements that have a value to compare with."""
    finite = torch.isfinite(expected.eager) & torch.isfinite(expected.exact)
    return finite if expected.unsettled is None else finite & ~expected.unsettled


def unsettled(eager: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
    """Where two baselines differ in what is NaN or infinite; None where they do not."""
    differ = (torch.isnan(eager) != torch.isnan(other)) | (torch.isinf(eager) != torch.isinf(other))
    return differ if bool(differ.any()) else None


def _wrong(detail: str, guard: Guard = Guard.BUDGET) -> Comparison:
    return Comparison(passed=False, error=None, budget=None, detail=detail, guard=guard)


def _right(error: float, budget: float) -> Comparison:
    return Comparison(passed=True, error=error, budget=budget, detail="")
