"""Operators that move elements: concatenation, padding, flips, pixel shuffles, patches."""

from __future__ import annotations

import math
from random import Random
from typing import Any

from operator_templates.lanes import order, same, shuffled
from operator_templates.template import Cost, Operand, Template
from operator_templates.values import EQUIVARIANT, Call, Lanes, Shape, Trait, Traits


def some_dim(rng: Random, shape: Shape) -> dict[str, Any]:
    return {"dim": rng.choice(range(1, len(shape)))}


def long_dim(rng: Random, shape: Shape) -> dict[str, Any] | None:
    dims = [d for d in range(1, len(shape)) if shape[d] >= 8]
    if not dims:
        return None
    dim = rng.choice(dims)
    return {"dim": dim, "shifts": rng.choice((1, 3, shape[dim] // 3, shape[dim] // 2 + 1))}


def grown(call: Call, dim: int, factor: int) -> Shape:
    return (*call.shape[:dim], factor * call.shape[dim], *call.shape[dim + 1 :])


def moved(call: Call) -> Traits:
    return frozenset({(Trait.MOVED, frozenset({call.dim}))})


def interleaved(call: Call) -> Lanes:
    """Half from each of two tensors."""
    left, right = call.x.lanes, call.inputs[1].lanes
    return tuple(left[i] if i % 2 else right[i] for i in range(len(left)))


def both_low(call: Call) -> float:
    return min(call.inputs[0].low, call.inputs[1].low)


def same_low(call: Call) -> float:
    return call.x.low


def padded(call: Call) -> Shape:
    p = call["pad"]
    return (*call.shape[:-2], call.shape[-2] + 2 * p, call.shape[-1] + 2 * p)


def padding(rng: Random, shape: Shape) -> dict[str, Any] | None:
    """A border of at least a twentieth of the image, so that it weighs in the output."""
    side = min(shape[-2:])
    return (
        {"pad": rng.choice([p for p in (1, 2, 3, 4, 6) if 20 * p >= side])}
        if 8 <= side <= 120
        else None
    )


def upscale(rng: Random, shape: Shape) -> dict[str, Any] | None:
    factors = [r for r in (2, 3, 4) if shape[1] % (r * r) == 0 and shape[1] > r * r]
    return {"upscale_factor": rng.choice(factors)} if factors else None


def downscale(rng: Random, shape: Shape) -> dict[str, Any] | None:
    factors = [r for r in (2, 3, 4) if shape[2] % r == 0 and shape[3] % r == 0]
    return {"downscale_factor": rng.choice(factors)} if factors and shape[1] <= 64 else None


def shuffled_up(call: Call) -> Shape:
    n, c, h, w = call.shape
    r = call["upscale_factor"]
    return (n, c // (r * r), h * r, w * r)


def shuffled_down(call: Call) -> Shape:
    n, c, h, w = call.shape
    r = call["downscale_factor"]
    return (n, c * r * r, h // r, w // r)


def patches(call: Call) -> Shape:
    n, c, h, w = call.shape
    k = call["kernel_size"]
    return (n, c * k * k, (h - k + 1) * (w - k + 1))


def channel_groups(rng: Random, shape: Shape) -> dict[str, Any] | None:
    groups = [g for g in (2, 4, 8) if shape[1] % g == 0 and shape[1] > g]
    return {"groups": rng.choice(groups)} if groups else None


def with_zeros(call: Call) -> Lanes:
    keep = order(f"{call.salt}/kept")
    return tuple(0.0 if k % 8 == 0 else v for v, k in zip(call.x.lanes, keep, strict=True))


def shape_template(name: str, doc: str, **more: Any) -> Template:
    fields: dict[str, Any] = {
        "canonical": (name.rsplit(".", 1)[-1],),
        "sample": shuffled,
        "low": same_low,
        "keeps": EQUIVARIANT,
        "cost": Cost(cpu_ns=0.3, passes=1.2),
    }
    return Template(name=name, family="shape", doc=doc, **(fields | more))


TEMPLATES: list[Template] = [
    shape_template(
        "torch.cat",
        "two tensors side by side",
        forward="torch.cat([{x}, {other}], dim={dim})",
        operands=(Operand(name="other", joinable=True),),
        draw=some_dim,
        sample=interleaved,
        low=both_low,
        shape=lambda call: grown(call, call.dim, 2),
    ),
    shape_template(
        "torch.stack",
        "two tensors stacked",
        forward="torch.stack([{x}, {other}], dim={dim})",
        operands=(Operand(name="other", joinable=True),),
        ranks=(2, 3, 4),
        draw=some_dim,
        sample=interleaved,
        low=both_low,
        shape=lambda call: (*call.shape[: call.dim], 2, *call.shape[call.dim :]),
    ),
    shape_template(
        "torch.flip",
        "a reversal of one dim",
        forward="torch.flip({x}, dims=({dim},))",
        draw=long_dim,
        leaves=moved,
    ),
    shape_template(
        "torch.roll",
        "a cyclic shift of one dim",
        forward="torch.roll({x}, shifts={shifts}, dims={dim})",
        draw=long_dim,
        leaves=moved,
    ),
    shape_template(
        "torch.repeat_interleave",
        "every element repeated along one dim",
        forward="torch.repeat_interleave({x}, {repeats}, dim={dim})",
        draw=lambda rng, shape: some_dim(rng, shape) | {"repeats": rng.choice((2, 3))},
        shape=lambda call: grown(call, call.dim, call["repeats"]),
        cost=Cost(cpu_ns=1.0, passes=1.5),
    ),
    shape_template(
        "F.pad",
        "a border of zeros",
        variant="zeros",
        canonical=("pad",),
        ranks=(4,),
        draw=padding,
        forward="F.pad({x}, ({pad}, {pad}, {pad}, {pad}))",
        shape=padded,
        sample=with_zeros,
        low=lambda call: 0.0 if call.x.low >= 0 else -math.inf,
    ),
    shape_template(
        "F.pad",
        "a reflected border",
        variant="reflect",
        canonical=("pad",),
        ranks=(4,),
        draw=padding,
        forward='F.pad({x}, ({pad}, {pad}, {pad}, {pad}), mode="reflect")',
        shape=padded,
    ),
    shape_template(
        "F.pixel_shuffle",
        "channels folded into pixels",
        ranks=(4,),
        draw=upscale,
        forward="F.pixel_shuffle({x}, {upscale_factor})",
        shape=shuffled_up,
        cost=Cost(cpu_ns=0.5, passes=2.0),
    ),
    shape_template(
        "F.pixel_unshuffle",
        "pixels folded into channels",
        ranks=(4,),
        draw=downscale,
        forward="F.pixel_unshuffle({x}, {downscale_factor})",
        shape=shuffled_down,
        cost=Cost(cpu_ns=0.5, passes=2.0),
    ),
    shape_template(
        "F.channel_shuffle",
        "channels interleaved between groups",
        ranks=(4,),
        draw=channel_groups,
        forward="F.channel_shuffle({x}, {groups})",
        cost=Cost(cpu_ns=0.5, passes=1.5),
        leaves=lambda call: frozenset({(Trait.MOVED, frozenset({1}))}),
    ),
    shape_template(
        "F.unfold",
        "sliding patches as columns",
        ranks=(4,),
        shape=patches,
        sample=same,
        forward="F.unfold({x}, {kernel_size})",
        cost=Cost(cpu_ns=1.0, passes=2.0),
        draw=lambda rng, shape: (
            {"kernel_size": rng.choice((2, 3))} if min(shape[2:]) >= 8 else None
        ),
    ),
]
