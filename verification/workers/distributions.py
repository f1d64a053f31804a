"""How inputs are changed, so that they are not always what `get_inputs()` draws.

Those that keep the domain of what they change (signs, positive numbers, the unit interval) suit any
operator:

    natural     as `get_inputs()` draws them
    small       x / 64
    structured  sizes sorted along the last dimension, signs where they were: neighbours are alike,
                extremes sit together, and a sum cancels no more than it did

The others leave it, on purpose: most problems draw from the unit interval and mean all numbers.
They are skipped where the reference refuses them (`widens` says for which problems not even to
try, because on a GPU a failed assertion ends the process):

    centred     4 (x - mean) + 1: both signs, another mean and spread
    large       128 x, which is exact: no two numbers become equal
    heavy       x * |x|, and 7 elements that weigh a quarter of all others together
    special     NaN, infinities, zeros, very large and very small numbers in 64 places

What the problem's own inputs say by their structure stays: zeros are zero in every distribution (a
triangular matrix is one), and floats that are all whole numbers (masks, indices) are not changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

Change = Callable[[torch.Tensor, int], torch.Tensor]
"""Of a tensor, with a seed."""
KEEPING: dict[str, Change] = {
    "natural": lambda x, _: x,
    "small": lambda x, _: x / 64,
    "structured": lambda x, _: x.abs().sort(dim=-1).values * x.sign() if x.dim() else x,
}
ZEROS_SHARE = 1 / 64
"""With more zeros than that a tensor is not sorted: they have their places."""
WIDENING: dict[str, Change] = {
    "centred": lambda x, _: (
        x.double().sub_(x.mean(dtype=torch.float64)).mul_(4.0).add_(1.0).to(x.dtype)
    ),
    "large": lambda x, _: x * 128,
    "heavy": lambda x, seed: _with_outliers(x, seed),
    "special": lambda x, _: _with_specials(x),
}
DISTRIBUTIONS = {**KEEPING, **WIDENING}
ASSERTING = ("binary_cross_entropy(", "BCELoss(", "bernoulli", "multinomial", ".long()", ".int()")
"""What makes a float that is out of its domain a failed assertion on a GPU."""
SPECIALS = (float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e-40, -1e-40, 1e18)
"""The last one has a square in fp32: variances by different formulas differ in what overflows."""
NEEDLES = 64
NEEDLE_SIZE = 50.0
"""Of the root mean square: a mean over a million moves by more than any budget."""
OUTLIERS, OUTLIERS_SHARE = 7, 0.25
"""Of seven alike no half has half of the weight, no third a third. The share is what they add to a
sum, of all the others: a mean over a part of billions of elements is within any budget where all
are alike."""
STATE_NEEDLES, STATE_NEEDLE_SIZE = 4, 3.0
"""The same for parameters and buffers, which keep it while the solution is timed. Few, so that code
that looks at some elements to see whether anything has changed hardly meets one."""


def changed(x: torch.Tensor, distribution: str, seed: int = 0) -> torch.Tensor:
    """A floating tensor of the problem's, drawn from another distribution."""
    if distribution == "natural" or bool((x == x.round()).all()):
        return x
    zeros = x == 0
    if distribution == "structured" and int(zeros.sum()) > ZEROS_SHARE * x.numel():
        return x
    return torch.where(zeros, x, DISTRIBUTIONS[distribution](x, seed))


def widens(code: str) -> bool:
    """Whether a problem can be tried on inputs outside the domain of its own."""
    return not any(name in code for name in ASSERTING)


def _with_outliers(x: torch.Tensor, seed: int) -> torch.Tensor:
    """x * |x| with OUTLIERS elements that hold OUTLIERS_SHARE of a sum: who leaves out elements,
    and makes up for them by those he has seen, is wrong by that share of it.

    Not covered: fp16, which has no room for so large ones among more than 7,168; and what is
    bounded, such as a mean of sigmoids: over 2**25 of them a part tells as much as all within any
    budget, and only the roofline is left to refuse who has not read them.
    """
    changed = x * x.abs()
    flat = as_it_lies(changed)
    if flat is not None:
        size = max(NEEDLE_SIZE, OUTLIERS_SHARE * flat.numel() / OUTLIERS)
        places = _places(flat, seed)
        signs = flat[places].sign()
        # All of one sign: two that cancel would leave of a plain sum its rounding errors.
        places = places[signs == (1.0 if bool((signs > 0).any()) else -1.0)]
        places = places[:: max(1, len(places) // OUTLIERS)][:OUTLIERS]
        _stick(flat, places, size, most=torch.finfo(x.dtype).max ** 0.5)
    return changed


def _with_specials(x: torch.Tensor) -> torch.Tensor:
    """Special values in NEEDLES places that follow from nothing but the shape."""
    changed = x.clone()
    flat = as_it_lies(changed)  # of a transposed one too
    if flat is None:
        return changed
    places = _places(x, 0)
    values = torch.tensor(SPECIALS, dtype=torch.float64, device=x.device).to(x.dtype)
    flat[places] = values.repeat(NEEDLES // len(SPECIALS))[: len(places)]
    return changed


def add_needles(
    values: list[Any], seed: int, size: float = NEEDLE_SIZE, needles: int = NEEDLES
) -> None:
    """Change up to `needles` elements of every tensor in place, without torch's noticing (its
    version counters stay): floats become `size` to 1.25 `size` times the root mean square, no two
    alike, with their sign kept; zeros and infinities stay, others change places."""
    for index, value in enumerate(values):
        flat = as_it_lies(value)
        if flat is None:
            continue
        places = _places(flat, seed + index, needles)
        if value.is_floating_point():
            _stick(flat, places, size)
        else:
            flat[places] = flat[places].roll(1)


def _stick(flat: torch.Tensor, places: torch.Tensor, size: float, most: float = math.inf) -> None:
    """Make the elements in `places` `size` to 1.25 `size` times the root mean square, at `most`."""
    picked = flat[places]
    wide = torch.float64 if flat.dtype == torch.float64 else torch.float32
    rms = torch.linalg.vector_norm(flat, dtype=wide).double() / flat.numel() ** 0.5
    sizes = torch.linspace(size, 1.25 * size, len(places), dtype=torch.float64, device=flat.device)
    found = picked.sign().double() * (rms * sizes).clamp(max=most)
    flat[places] = torch.where(picked.isfinite() & rms.isfinite(), found.to(flat.dtype), picked)


def as_it_lies(value: Any) -> torch.Tensor | None:
    """All elements of a tensor in the order of its memory, transposed or not, as a view that has a
    version counter of its own; None where they overlap or have gaps, or there are none."""
    if not isinstance(value, torch.Tensor) or not value.numel():
        return None
    order = sorted(range(value.dim()), key=lambda d: -value.stride()[d])
    packed = value.data.permute(order)
    return packed.view(-1) if packed.is_contiguous() else None


def _places(value: torch.Tensor, seed: int, needles: int = NEEDLES) -> torch.Tensor:
    """Up to so many distinct flat positions."""
    generator = torch.Generator().manual_seed(seed)
    count = value.numel()
    picked = torch.randint(0, count, (needles,), generator=generator).unique()
    return picked.to(value.device)
