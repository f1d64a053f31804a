"""Softmax and its relatives. Long rows give tiny numbers that zeros would match, so rows stay
short.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Any

from operator_templates.lanes import rounded
from operator_templates.template import WIDE, Cost, Template
from operator_templates.values import Call, Lanes, Shape, Trait, Traits, log_mean_exp


def short_dim(rng: Random, shape: Shape) -> dict[str, Any] | None:
    """A dim of 4 to 128 elements, other than the batch."""
    dims = [d for d in range(1, len(shape)) if 4 <= shape[d] <= 128]
    return {"dim": rng.choice(dims)} if dims else None


def any_dim(rng: Random, shape: Shape) -> dict[str, Any] | None:
    dims = [d for d in range(1, len(shape)) if shape[d] >= 4]
    return {"dim": rng.choice(dims)} if dims else None


def log_softmax_of(x: Sequence[float], width: int) -> list[float]:
    """Log-softmax over `width` elements distributed like x."""
    total = log_mean_exp(x) + math.log(width)
    return [v - total for v in x]


def along(call: Call) -> int:
    return call.shape[call.dim]


def log_softmax(call: Call) -> Lanes:
    return rounded(log_softmax_of(call.x.lanes, along(call)))


def softmax(call: Call) -> Lanes:
    return rounded([math.exp(v) for v in log_softmax_of(call.x.lanes, along(call))])


def softmin(call: Call) -> Lanes:
    return rounded([math.exp(v) for v in log_softmax_of([-v for v in call.x.lanes], along(call))])


def one(call: Call) -> frozenset[int]:
    return frozenset({call.dim})


def leaves(call: Call) -> Traits:
    return frozenset({(Trait.SIMPLEX, one(call))})


def blind(call: Call) -> Traits:
    return frozenset({(Trait.SHIFTED, one(call))})


SOFTMAX = Template(
    name="torch.softmax",
    family="softmax",
    doc="a softmax",
    canonical=("softmax",),
    domain=WIDE,
    forward="torch.softmax({x}, dim={dim})",
    draw=short_dim,
    sample=softmax,
    low=lambda call: 0.0,
    leaves=leaves,
    blind=blind,
    cost=Cost(cpu_ns=0.8, passes=1.2),
)

TEMPLATES: list[Template] = [
    SOFTMAX,
    SOFTMAX.but(
        name="nn.Softmax", init="nn.Softmax(dim={dim})", attribute="softmax", forward="{m}({x})"
    ),
    SOFTMAX.but(
        name="F.softmin",
        doc="a softmin",
        canonical=("softmin",),
        forward="F.softmin({x}, dim={dim})",
        sample=softmin,
        cost=Cost(cpu_ns=1.0, passes=2.2),
    ),
    SOFTMAX.but(
        name="F.log_softmax",
        doc="a log-softmax",
        canonical=("log_softmax",),
        forward="F.log_softmax({x}, dim={dim})",
        draw=any_dim,
        sample=log_softmax,
        low=lambda call: -math.inf,
        leaves=lambda call: frozenset(),
    ),
]
