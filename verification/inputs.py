"""Inputs from a seed, the same bits in the reference's and in the solution's process.

The solution's process never sees the reference: `without_model` removes it from the text that
makes the inputs. Distributions are maps that keep the domain of what they change (signs,
positive numbers, the unit interval), so that they suit any operator:

    natural     as `get_inputs()` draws them
    small       x / 64
    heavy       x * |x|: a heavier tail
    structured  sorted along the last dimension: neighbours are alike, extremes sit together

Not covered: values a domain would allow but `get_inputs()` never comes near, such as infinities.
"""

from __future__ import annotations

import ast
import random
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from runtime.problem_code import make_inputs

DISTRIBUTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "natural": lambda x: x,
    "small": lambda x: x / 64,
    "heavy": lambda x: x * x.abs(),
    "structured": lambda x: x.sort(dim=-1).values if x.dim() else x,
}
DRAWS = ("natural", "natural", "small", "heavy", "structured")
"""The five draws of a verdict."""

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


def without_model(code: str) -> str:
    """The problem's text without its classes: what is left makes the inputs."""
    tree = ast.parse(code)
    tree.body = [node for node in tree.body if not isinstance(node, ast.ClassDef)]
    return ast.unparse(tree) + "\nModel = None\n"


def draw_inputs(module: types.ModuleType, device: str, draw: Draw) -> list[Any]:
    """The inputs of a draw on `device`; integer tensors stay as `get_inputs()` makes them."""
    change = DISTRIBUTIONS[draw.distribution]
    return [
        change(value) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for value in make_inputs(module, device, draw.seed)
    ]


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
    which
    keeps signs and domains."""
    generator = torch.Generator().manual_seed((seed << 20) + count)
    for value in inputs:
        if not isinstance(value, torch.Tensor) or not value.is_contiguous():
            continue
        if value.is_floating_point() and value.numel() > 0:
            flat = value.view(-1)
            size = min(BLOCK, flat.numel())
            start, turn = (
                int(torch.randint(0, bound, (), generator=generator))
                for bound in (flat.numel() - size + 1, size)
            )
            block = flat[start : start + size]
            block.copy_(block.roll(turn) * 0.875)
