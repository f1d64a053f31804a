"""Inputs from a seed, the same bits in the reference's and in the solution's process.

The solution's process never sees the reference: `without_model` removes it from the text that
makes the inputs. A draw is what `get_inputs()` makes, changed by a distribution. Those that keep
the domain of what they change (signs, positive numbers, the unit interval) suit any operator:

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

import ast
import math
import random
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from runtime.problem_code import make_inputs

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
DRAWS = {
    "reward": (
        ("natural", "centred", "large"),
        ("heavy", "special", "small", "structured"),
    ),
    "publish": (
        ("natural", "centred", "large", "special"),
        ("natural", "heavy", "structured", "small"),
    ),
}
"""The draws of a verdict; between the two groups the parameters change in place, and needles go
into the inputs of the last one, which therefore is none with special values. Small ones are in both
because two tricks of 115 solutions fell to nothing else, special values because a kernel that drops
NaN would be paid for what is refused later."""
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

RING_SLOTS, LARGE_RING_SLOTS = 4, 2
LARGE_BYTES = 256 << 20
"""Inputs from here on overflow every cache by themselves: two sets are enough."""
BLOCK = 4096
WORDS = 1 << 25


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One set of inputs (`seed`, `distribution`) for a model with parameters from `state_seed`."""

    seed: int
    distribution: str
    state_seed: int


COMPUTING = ("Module", "Function")
"""How the names of classes end whose heirs compute."""


def without_model(code: str) -> str:
    """The problem's text without its modules: what is left makes the inputs."""
    tree, gone = ast.parse(code), {"Model"}
    for index, node in enumerate(tree.body):
        if isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base) for base in node.bases]
            if node.name in gone or any(b in gone or b.endswith(COMPUTING) for b in bases):
                gone.add(node.name)
                tree.body[index] = ast.parse(f"{node.name} = None").body[0]
    return ast.unparse(tree) + "\n"


def draw_inputs(module: types.ModuleType, device: str, draw: Draw) -> list[Any]:
    """The inputs of a draw on `device`; integer tensors stay as `get_inputs()` makes them."""
    return [
        changed(value, draw.distribution, draw.seed + index)
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for index, value in enumerate(make_inputs(module, device, draw.seed))
    ]


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


def resized(values: list[Any]) -> list[Any] | None:
    """The same inputs with one row less, in every tensor that has as many rows as the first.

    None where there is no row to leave out.
    """
    tensors = [v for v in values if isinstance(v, torch.Tensor) and v.dim()]
    if not tensors or tensors[0].shape[0] < 2:
        return None
    rows = tensors[0].shape[0]
    return [
        v[:-1].clone() if isinstance(v, torch.Tensor) and v.dim() and v.shape[0] == rows else v
        for v in values
    ]


def _with_outliers(x: torch.Tensor, seed: int) -> torch.Tensor:
    """x * |x| with OUTLIERS elements that hold OUTLIERS_SHARE of a sum: who leaves out elements,
    and makes up for them by those he has seen, is wrong by that share of it.

    Not covered: fp16, which has no room for so large ones among more than 7,168; and what is
    bounded, such as a mean of sigmoids: over 2**25 of them a part tells as much as all within any
    budget, and only the roofline is left to refuse who has not read them.
    """
    changed = x * x.abs()
    flat = _as_it_lies(changed)
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
    flat = _as_it_lies(changed)  # of a transposed one too
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
        flat = _as_it_lies(value)
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


def _as_it_lies(value: Any) -> torch.Tensor | None:
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


def checksum(values: list[Any]) -> str:
    """A hash of tensor contents, computed on their device: any changed bit changes it.

    A weighted sum of the raw words modulo 2**64, so the order of words counts too. The device is
    asked once.
    """
    sums = [_word_sum(value) for value in values if isinstance(value, torch.Tensor)]
    total = 0
    for position, words in enumerate(torch.stack(sums).tolist() if sums else []):
        total = (total * 1_000_003 + position + words) % 2**64
    return f"{total:016x}"


def _word_sum(value: torch.Tensor) -> torch.Tensor:
    """An int64 scalar; its arithmetic wraps round."""
    flat = value.detach().contiguous().flatten()
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()  # words can only be read from an aligned start
    flat = flat.view(torch.uint8)
    whole = flat[: flat.numel() // 8 * 8].view(torch.int64)
    rest = flat[whole.numel() * 8 :].to(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for words in (*whole.split(WORDS), rest):
        weights = torch.arange(words.numel(), device=words.device).mul_(2).add_(1)
        total = total * 31 + weights.mul_(words).sum()
    return total


class InputRing:
    """Input sets for timed calls: distinct buffers, new values before every call.

    Several sets keep a call from finding its inputs in a cache. `advance` rewrites one block of
    each floating tensor of the next set in place, so that an answer remembered by address is
    wrong. All of it follows from the seed: `timed_inputs` makes the inputs of any one call
    again.
    """

    def __init__(self, module: types.ModuleType, device: str, seed: int) -> None:
        self._seed = seed
        first = make_inputs(module, device, seed)
        self._sets = [first]
        self._sets += [make_inputs(module, device, seed + k) for k in range(1, _slots(first))]
        self._count = 0

    def advance(self) -> list[Any]:
        """The inputs of the next timed call."""
        inputs = self._sets[_slot(self._seed, self._count, len(self._sets))]
        _rewrite(inputs, self._seed, self._count)
        self._count += 1
        return inputs


def timed_inputs(module: types.ModuleType, device: str, seed: int, count: int) -> list[Any]:
    """The inputs of call number `count` (from 0) of the ring with this seed."""
    inputs = make_inputs(module, device, seed)
    slots = _slots(inputs)
    slot = _slot(seed, count, slots)
    if slot:
        inputs = make_inputs(module, device, seed + slot)
    for earlier in range(count + 1):
        if _slot(seed, earlier, slots) == slot:
            _rewrite(inputs, seed, earlier)
    return inputs


def _slot(seed: int, count: int, slots: int) -> int:
    """Which set a call uses: every set once per turn of the ring, in an order of that turn's own.

    In a fixed order the sides of a comparison could each get their own sets, and with them the luck
    of where those lie in memory.
    """
    turn, place = divmod(count, slots)
    order = list(range(slots))
    random.Random(f"{seed}/{turn}").shuffle(order)
    return order[place]


def _slots(inputs: list[Any]) -> int:
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    total = sum(value.numel() * value.element_size() for value in tensors)
    return RING_SLOTS if total < LARGE_BYTES else LARGE_RING_SLOTS


def _rewrite(inputs: list[Any], seed: int, count: int) -> None:
    """New values in one block of each floating tensor: turned round, and scaled by an exact 7/8,
    which keeps signs and domains. Zeros stay where they are, and so do whole numbers."""
    generator = torch.Generator().manual_seed((seed << 20) + count)
    for value in inputs:
        flat = _as_it_lies(value)
        if flat is not None and flat.is_floating_point():
            size = min(BLOCK, flat.numel())
            start, turn = (
                int(torch.randint(0, bound, (), generator=generator))
                for bound in (flat.numel() - size + 1, size)
            )
            block = flat[start : start + size]
            turned = torch.where((block == 0).any(), block, block.roll(turn)) * 0.875
            block.copy_(torch.where((block == block.round()).all(), block, turned))
