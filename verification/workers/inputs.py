"""Inputs from a seed, the same bits in the reference's and in the solution's process.

The solution's process never sees the reference: `without_model` removes it from the text that
makes the inputs. A draw is what `get_inputs()` makes, changed by a distribution.
"""

from __future__ import annotations

import ast
import types
from dataclasses import dataclass
from typing import Any

import torch

from runtime.problem_code import make_inputs
from verification.workers.distributions import changed

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
COMPUTING = ("Module", "Function")
"""How the names of classes end whose heirs compute."""
WORDS = 1 << 25


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One set of inputs (`seed`, `distribution`) for a model with parameters from `state_seed`."""

    seed: int
    distribution: str
    state_seed: int


def without_model(code: str) -> str:
    """The problem's text without its modules: what is left makes the inputs. It has a `Model` of
    None also where the problem has no model, which is not the solution's fault."""
    tree, gone = ast.parse(code), {"Model"}
    for index, node in enumerate(tree.body):
        if isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base) for base in node.bases]
            if node.name in gone or any(b in gone or b.endswith(COMPUTING) for b in bases):
                gone.add(node.name)
                tree.body[index] = ast.parse(f"{node.name} = None").body[0]
    return ast.unparse(tree) + "\nModel = None\n"


def draw_inputs(module: types.ModuleType, device: str, draw: Draw) -> list[Any]:
    """The inputs of a draw on `device`; integer tensors stay as `get_inputs()` makes them."""
    return [
        changed(value, draw.distribution, draw.seed + index)
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for index, value in enumerate(make_inputs(module, device, draw.seed))
    ]


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
