"""Inputs of timed calls: never the same twice, and any one can be made again."""

from __future__ import annotations

import random
import types
from typing import Any

import torch

from runtime.problem_code import make_inputs
from verification.workers.distributions import as_it_lies

RING_SLOTS, LARGE_RING_SLOTS = 4, 2
LARGE_BYTES = 256 << 20
"""Inputs from here on overflow every cache by themselves: two sets are enough."""
BLOCK = 4096


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
        flat = as_it_lies(value)
        if flat is not None and flat.is_floating_point():
            size = min(BLOCK, flat.numel())
            start, turn = (
                int(torch.randint(0, bound, (), generator=generator))
                for bound in (flat.numel() - size + 1, size)
            )
            block = flat[start : start + size]
            turned = torch.where((block == 0).any(), block, block.roll(turn)) * 0.875
            block.copy_(torch.where((block == block.round()).all(), block, turned))
