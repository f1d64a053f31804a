"""Running sums, products and maxima along one dim."""

from __future__ import annotations

import math
from random import Random
from typing import Any

from operator_templates.lanes import Rule, groups, rounded, scanned, uniform
from operator_templates.template import POSITIVE, Cost, Template
from operator_templates.values import EQUIVARIANT, Call, Lanes, Shape, log_mean_exp


def scan_dim(rng: Random, shape: Shape) -> dict[str, Any] | None:
    dims = [d for d in range(1, len(shape)) if 16 <= shape[d] <= 8192]
    return {"dim": rng.choice(dims)} if dims else None


def length(call: Call) -> int:
    return call.shape[call.dim]


def prefixes(call: Call) -> list[list[float]]:
    """For every lane, the sampled elements up to a position spread over the dim."""
    x, members = call.x.lanes, groups(call.salt, min(32, length(call)))
    positions = uniform(f"{call.salt}/steps")
    return [
        [x[j] for j in g[: max(1, math.ceil(len(g) * u))]]
        for g, u in zip(members, positions, strict=True)
    ]


def running_max(call: Call) -> Lanes:
    return rounded([max(p) for p in prefixes(call)])


def running_min(call: Call) -> Lanes:
    return rounded([min(p) for p in prefixes(call)])


def running_logsumexp(call: Call) -> Lanes:
    stretch = math.log(max(1.0, length(call) / 32))
    return rounded([log_mean_exp(p) + math.log(len(p)) + stretch for p in prefixes(call)])


def scan(name: str, doc: str, sample: Rule, **more: Any) -> Template:
    fields: dict[str, Any] = {
        "canonical": (name.removeprefix("torch."),),
        "forward": f"{name}({{x}}, dim={{dim}})",
        "draw": scan_dim,
        "keeps": EQUIVARIANT,
        "cost": Cost(cpu_ns=1.5, passes=3.0),
    }
    return Template(name=name, family="scan", doc=doc, sample=sample, **(fields | more))


def products_near_one(call: Call) -> Lanes:
    """cumprod over a short dim of positive numbers near one."""
    return rounded([math.prod(p) for p in prefixes(call)])


def short_dim(rng: Random, shape: Shape) -> dict[str, Any] | None:
    dims = [d for d in range(1, len(shape)) if 8 <= shape[d] <= 32]
    return {"dim": rng.choice(dims)} if dims else None


TEMPLATES: list[Template] = [
    scan("torch.cumsum", "a running sum", scanned(length)),
    scan(
        "torch.cumprod",
        "a running product over a short dim",
        products_near_one,
        draw=short_dim,
        domain=POSITIVE,
        low=lambda call: 0.0,
    ),
    scan(
        "torch.cummax",
        "a running maximum",
        running_max,
        forward="torch.cummax({x}, dim={dim}).values",
        low=lambda call: call.x.low,
        cost=Cost(cpu_ns=4.0, passes=6.0),
    ),
    scan(
        "torch.cummin",
        "a running minimum",
        running_min,
        forward="torch.cummin({x}, dim={dim}).values",
        low=lambda call: call.x.low,
        cost=Cost(cpu_ns=4.0, passes=6.0),
    ),
    scan(
        "torch.logcumsumexp",
        "a running log-sum-exp",
        running_logsumexp,
        cost=Cost(cpu_ns=12.0, passes=5.0),
    ),
]
