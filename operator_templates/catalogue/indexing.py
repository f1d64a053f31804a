"""Selection by index tensors and by position."""

from __future__ import annotations

import math
from random import Random
from typing import Any

from operator_templates.lanes import LANES, normal, order, picked, pointwise
from operator_templates.template import INDEX, MASK, Cost, Operand, Template
from operator_templates.values import EQUIVARIANT, Call, Lanes, Shape, Trait, Traits


def some_dim(rng: Random, shape: Shape) -> dict[str, Any] | None:
    dims = [d for d in range(1, len(shape)) if shape[d] >= 16]
    return {"dim": rng.choice(dims)} if dims else None


def along(call: Call) -> int:
    return call.shape[call.dim]


def index_vector(call: Call) -> Shape:
    return (along(call),)


def vocabulary(rng: Random, shape: Shape) -> dict[str, Any] | None:
    if math.prod(shape) > 1 << 22:
        return None
    return {
        "num_embeddings": rng.choice((1000, 4096, 10007, 32000)),
        "embedding_dim": rng.choice((32, 48, 64, 96)),
    }


def zeroed(call: Call) -> Lanes:
    """Half of the elements become zero."""
    keep = order(f"{call.salt}/kept")
    return tuple(v if k % 2 else 0.0 for v, k in zip(call.x.lanes, keep, strict=True))


def zero_low(call: Call) -> float:
    return 0.0 if call.x.low >= 0 else -math.inf


def same_low(call: Call) -> float:
    return call.x.low


def moved(call: Call) -> Traits:
    return frozenset({(Trait.MOVED, frozenset({call.dim}))})


def triangle(rng: Random, shape: Shape) -> dict[str, Any] | None:
    """Where a triangle is neither all nor nothing: rows and columns within a factor of two."""
    rows, columns = shape[-2:]
    return (
        {"diagonal": rng.choice((-3, -1, 0, 1, 2))}
        if rows <= 2 * columns <= 4 * rows and rows >= 16
        else None
    )


def select(x: float, mask: float, call: Call) -> float:
    return float(call["fill"]) if mask > 0.5 else x


GATHER = Template(
    name="torch.gather",
    family="indexing",
    doc="a gather along one dim",
    canonical=("gather",),
    forward="torch.gather({x}, {dim}, {index})",
    draw=some_dim,
    operands=(Operand(name="index", domain=INDEX, below=along),),
    sample=picked,
    keeps=EQUIVARIANT,
    low=same_low,
    leaves=moved,
    cost=Cost(cpu_ns=0.8, passes=1.3),
)

TRIL = Template(
    name="torch.tril",
    family="indexing",
    doc="the lower triangle of each matrix",
    canonical=("tril",),
    forward="torch.tril({x}, diagonal={diagonal})",
    draw=triangle,
    sample=zeroed,
    low=zero_low,
    cost=Cost(cpu_ns=0.3),
)

TEMPLATES: list[Template] = [
    Template(
        name="torch.index_select",
        family="indexing",
        doc="a selection of slices by index",
        canonical=("index_select",),
        forward="torch.index_select({x}, {dim}, {index})",
        draw=some_dim,
        operands=(Operand(name="index", domain=INDEX, shape=index_vector, below=along),),
        sample=picked,
        keeps=EQUIVARIANT,
        low=same_low,
        leaves=moved,
        cost=Cost(cpu_ns=0.5, passes=1.5),
    ),
    GATHER,
    GATHER.but(
        name="torch.take_along_dim",
        canonical=("take_along_dim",),
        forward="torch.take_along_dim({x}, {index}, dim={dim})",
        cost=Cost(cpu_ns=1.0, passes=1.4),
    ),
    Template(
        name="nn.Embedding",
        family="indexing",
        doc="rows of a learned table",
        canonical=("embedding",),
        init="nn.Embedding({num_embeddings}, {embedding_dim}{dtype})",
        attribute="embedding",
        forward="{m}({x})",
        domain=INDEX,
        ranks=(2,),
        draw=vocabulary,
        shape=lambda call: (*call.shape, call["embedding_dim"]),
        sample=lambda call: tuple(
            normal(f"{call.salt}/table")[int(u * LANES) % LANES] for u in call.x.lanes
        ),
    ),
    TRIL,
    TRIL.but(
        name="torch.triu",
        doc="the upper triangle of each matrix",
        canonical=("triu",),
        forward="torch.triu({x}, diagonal={diagonal})",
    ),
    Template(
        name="torch.where",
        family="indexing",
        doc="a choice between two tensors by a mask",
        canonical=("where",),
        forward="torch.where({mask}, {x}, {other})",
        operands=(Operand(name="other", joinable=True), Operand(name="mask", domain=MASK)),
        sample=pointwise(lambda x, y, m, call: x if m > 0.5 else y),
        keeps=frozenset({Trait.MOVED}),
    ),
    Template(
        name="torch.masked_fill",
        family="indexing",
        doc="a constant where a mask is set",
        canonical=("masked_fill",),
        forward="torch.masked_fill({x}, {mask}, {fill})",
        operands=(Operand(name="mask", domain=MASK),),
        draw=lambda rng, shape: {"fill": rng.choice((-2.0, -1.0, 0.0, 1.0))},
        sample=pointwise(select),
        keeps=frozenset({Trait.MOVED}),
    ),
]
