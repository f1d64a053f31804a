"""Pooling over windows and to fixed sizes."""

from __future__ import annotations

import math
from random import Random
from typing import Any

from operator_templates.lanes import Rule, extreme, statistic
from operator_templates.template import NO_CPU_BF16, Cost, Template
from operator_templates.values import EQUIVARIANT, Call, Shape, Trait, Traits, mean


def window(rng: Random, shape: Shape) -> dict[str, Any] | None:
    kernel, stride = rng.choice(((2, 2), (3, 2), (3, 1), (3, 3), (4, 2), (5, 2)))
    if min(shape[2:]) < 2 * kernel:
        return None
    return {"kernel_size": kernel, "stride": stride, "padding": rng.choice((0, kernel // 2))}


def pooled(call: Call) -> Shape:
    k, s, p = call["kernel_size"], call["stride"], call["padding"]
    return (*call.shape[:2], *((n + 2 * p - k) // s + 1 for n in call.shape[2:]))


def window_size(call: Call) -> int:
    return int(call["kernel_size"]) ** (len(call.shape) - 2)


def adaptive(rng: Random, shape: Shape) -> dict[str, Any] | None:
    size = rng.choice((4, 5, 7, 8, 14))
    return {"output_size": size} if min(shape[2:]) >= 2 * size else None


def adapted(call: Call) -> Shape:
    return (*call.shape[:2], *(call["output_size"] for _ in call.shape[2:]))


def adaptive_size(call: Call) -> int:
    return math.prod(math.ceil(n / call["output_size"]) for n in call.shape[2:])


def drop_simplex(call: Call) -> Traits:
    """A mean over windows of a softmax taken along the spatial dims is nearly constant."""
    return frozenset({(Trait.SIMPLEX, frozenset(range(2, len(call.shape))))})


def pool(name: str, rank: int, sample: Rule, doc: str, **more: Any) -> Template:
    """`nn.{name}{rank}d`."""
    module = f"nn.{name}{rank}d"
    snake = {"MaxPool": "max_pool", "AvgPool": "avg_pool"}.get(name, name)
    fields: dict[str, Any] = {
        "canonical": (f"{snake}{rank}d",),
        "init": f"{module}({{kernel_size}}, stride={{stride}}, padding={{padding}})",
        "draw": window,
        "shape": pooled,
        "low": lambda call: call.x.low,
        "keeps": EQUIVARIANT,
        "cost": Cost(cpu_ns=2.0 * rank, passes=1.0 + rank),
    }
    return Template(
        name=module,
        family="pooling",
        doc=doc,
        attribute="pool",
        forward="{m}({x})",
        ranks=(rank + 2,),
        sample=sample,
        blind=drop_simplex,
        **(fields | more),
    )


def adaptive_pool(name: str, rank: int, sample: Rule, doc: str) -> Template:
    snake = {"AdaptiveAvgPool": "adaptive_avg_pool", "AdaptiveMaxPool": "adaptive_max_pool"}[name]
    return pool(
        name,
        rank,
        sample,
        doc,
        init=f"nn.{name}{rank}d({{output_size}})",
        draw=adaptive,
        shape=adapted,
        canonical=(f"{snake}{rank}d",),
    )


MAX = extreme(max, window_size)
MEAN = statistic(mean, window_size)

TEMPLATES: list[Template] = [
    *(pool("MaxPool", rank, MAX, f"{rank}-d max pooling") for rank in (1, 2, 3)),
    *(
        pool(
            "AvgPool",
            rank,
            MEAN,
            f"{rank}-d average pooling",
            low=lambda call: min(call.x.low, 0.0),
            lacks=NO_CPU_BF16 if rank == 3 else frozenset(),
        )
        for rank in (1, 2, 3)
    ),
    *(
        adaptive_pool(
            "AdaptiveAvgPool",
            rank,
            statistic(mean, adaptive_size),
            "average pooling to a fixed size",
        )
        for rank in (1, 2)
    ),
    *(
        adaptive_pool(
            "AdaptiveMaxPool", rank, extreme(max, adaptive_size), "max pooling to a fixed size"
        )
        for rank in (1, 2)
    ),
]
