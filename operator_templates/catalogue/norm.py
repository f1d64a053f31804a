"""Normalisations. Those without a learned gain are near the identity on data that is normalised
already.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

from operator_templates.lanes import Rule, affine, normalised, rounded
from operator_templates.template import NO_CPU_BF16, WIDE, Cost, Template
from operator_templates.values import Call, Lanes, Shape, Trait, Traits, mean, rms

Dims = Callable[[Call], frozenset[int]]


def last(call: Call) -> frozenset[int]:
    return frozenset({len(call.shape) - 1})


def spatial(call: Call) -> frozenset[int]:
    return frozenset(range(2, len(call.shape)))


def but_batch(call: Call) -> frozenset[int]:
    return frozenset(range(1, len(call.shape)))


def blind_to(dims: Dims, *traits: Trait) -> Callable[[Call], Traits]:
    return lambda call: frozenset((t, dims(call)) for t in traits)


def centred(dims: Dims) -> Callable[[Call], Traits]:
    return lambda call: frozenset({(Trait.CENTRED, dims(call))})


def gain_along(dim: int) -> Callable[[Call], Traits]:
    """A learned gain and offset that vary along `dim` only."""
    return lambda call: frozenset(
        (t, call.all_dims(but=dim)) for t in (Trait.SHIFTED, Trait.SCALED)
    )


def norm(
    name: str, doc: str, sample: Rule, dims: Dims, *, blind: tuple[Trait, ...] = (), **more: Any
) -> Template:
    fields: dict[str, Any] = {
        "domain": WIDE,
        "attribute": "norm",
        "forward": "{m}({x})",
        "blind": blind_to(dims, *(blind or (Trait.SHIFTED, Trait.SCALED))),
        "cost": Cost(cpu_ns=0.4, passes=1.5),
    }
    return Template(name=name, family="norm", doc=doc, sample=sample, **(fields | more))


def eps(rng: Random) -> float:
    return rng.choice((1e-6, 1e-5, 1e-3))


def width(rng: Random, shape: Shape) -> dict[str, Any] | None:
    return {"normalized_shape": shape[-1], "eps": eps(rng)} if shape[-1] >= 16 else None


def channels(rng: Random, shape: Shape) -> dict[str, Any] | None:
    return {"num_features": shape[1], "eps": eps(rng)} if math.prod(shape[2:]) >= 16 else None


def grouped(rng: Random, shape: Shape) -> dict[str, Any] | None:
    groups = [g for g in (2, 4, 8, 16, 32) if shape[1] % g == 0 and shape[1] // g >= 2]
    if not groups or math.prod(shape[2:]) < 16:
        return None
    return {"num_groups": rng.choice(groups), "num_channels": shape[1], "eps": eps(rng)}


def batch_norm(call: Call) -> Lanes:
    """Evaluation mode: running statistics and gains, both away from their initial values."""
    moved = affine(call.x.lanes, f"{call.salt}/running")
    return affine(moved, call.salt)


def unit_length(call: Call) -> Lanes:
    x = call.x.lanes
    scale = rms(x) * math.sqrt(call.shape[call.dim])
    return rounded([v / max(scale, 1e-12) for v in x])


def local_response(call: Call) -> Lanes:
    """x / (k + alpha * mean of squares over `size` channels) ** beta."""
    energy = mean(tuple(v * v for v in call.x.lanes))
    return rounded([v / (1 + call["alpha"] * 0.5 * (energy + v * v)) ** 0.75 for v in call.x.lanes])


def normalize_dim(rng: Random, shape: Shape) -> dict[str, Any] | None:
    dims = [d for d in range(1, len(shape)) if 8 <= shape[d] <= 256]
    return {"dim": rng.choice(dims)} if dims else None


LAYER = norm(
    "nn.LayerNorm",
    "layer normalisation over the last dim",
    normalised(learned=True),
    last,
    canonical=("layer_norm",),
    init="nn.LayerNorm({normalized_shape}, eps={eps}{dtype})",
    draw=width,
    leaves=gain_along(-1),
    ranks=(2, 3),
)
BATCH = norm(
    "nn.BatchNorm2d",
    "batch normalisation with running statistics",
    batch_norm,
    spatial,
    canonical=("batch_norm",),
    init="nn.BatchNorm2d({num_features}, eps={eps}{dtype})",
    draw=channels,
    ranks=(4,),
    leaves=gain_along(1),
    cost=Cost(cpu_ns=0.2),
    attribute="bn",
).but(blind=lambda call: frozenset())
INSTANCE = norm(
    "nn.InstanceNorm2d",
    "instance normalisation with a learned gain",
    normalised(learned=True),
    spatial,
    canonical=("instance_norm",),
    init="nn.InstanceNorm2d({num_features}, eps={eps}, affine=True{dtype})",
    draw=channels,
    ranks=(4,),
    leaves=gain_along(1),
    cost=Cost(cpu_ns=0.7, passes=2.2),
)

TEMPLATES: list[Template] = [
    LAYER,
    LAYER.but(
        name="F.layer_norm",
        doc="layer normalisation without parameters",
        forward="F.layer_norm({x}, ({normalized_shape},), eps={eps})",
        init="",
        sample=normalised(learned=False),
        leaves=centred(last),
    ),
    norm(
        "nn.RMSNorm",
        "RMS normalisation over the last dim",
        normalised(learned=True, centre=False),
        last,
        blind=(Trait.SCALED,),
        canonical=("rms_norm",),
        init="nn.RMSNorm({normalized_shape}, eps={eps}{dtype})",
        draw=width,
        ranks=(2, 3),
        leaves=gain_along(-1),
        cost=Cost(cpu_ns=0.8, passes=2.0),
    ),
    norm(
        "nn.GroupNorm",
        "group normalisation",
        normalised(learned=True),
        spatial,
        canonical=("group_norm",),
        init="nn.GroupNorm({num_groups}, {num_channels}, eps={eps}{dtype})",
        draw=grouped,
        ranks=(3, 4, 5),
        leaves=gain_along(1),
        cost=Cost(cpu_ns=0.4, passes=1.8),
    ).but(
        blind=lambda call: frozenset((t, but_batch(call)) for t in (Trait.SHIFTED, Trait.SCALED))
    ),
    INSTANCE,
    INSTANCE.but(
        name="nn.InstanceNorm3d",
        ranks=(5,),
        init="nn.InstanceNorm3d({num_features}, eps={eps}, affine=True{dtype})",
    ),
    INSTANCE.but(
        name="F.instance_norm",
        doc="instance normalisation without parameters",
        forward="F.instance_norm({x}, eps={eps})",
        init="",
        ranks=(3, 4, 5),
        sample=normalised(learned=False),
        leaves=centred(spatial),
    ),
    BATCH,
    BATCH.but(
        name="nn.BatchNorm1d", ranks=(3,), init="nn.BatchNorm1d({num_features}, eps={eps}{dtype})"
    ),
    BATCH.but(
        name="nn.BatchNorm3d", ranks=(5,), init="nn.BatchNorm3d({num_features}, eps={eps}{dtype})"
    ),
    norm(
        "F.normalize",
        "scaling to unit length",
        unit_length,
        lambda call: frozenset({call.dim}),
        blind=(Trait.SCALED,),
        canonical=("normalize",),
        forward="F.normalize({x}, dim={dim})",
        draw=normalize_dim,
        cost=Cost(cpu_ns=0.5, passes=2.5),
    ),
    norm(
        "nn.LocalResponseNorm",
        "local response normalisation",
        local_response,
        spatial,
        blind=(Trait.MOVED,),
        canonical=("local_response_norm",),
        init="nn.LocalResponseNorm({size}, alpha={alpha}, beta=0.75, k=1.0)",
        attribute="lrn",
        draw=lambda rng, shape: (
            {"size": rng.choice((3, 5, 7)), "alpha": rng.choice((0.5, 1.0, 2.0))}
            if shape[1] >= 16
            else None
        ),
        ranks=(3, 4),
        cost=Cost(cpu_ns=6.0, passes=6.0),
        lacks=NO_CPU_BF16,
    ).but(blind=lambda call: frozenset()),
]
