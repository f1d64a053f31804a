"""Reductions over one dim, or over the spatial dims of an image."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

from operator_templates.lanes import Rule, extreme, scaled, statistic
from operator_templates.template import Cost, Template
from operator_templates.values import (
    Call,
    Lanes,
    Shape,
    Trait,
    Traits,
    log_mean_exp,
    mean,
    rms,
    std,
)


def reduced_dims(call: Call) -> frozenset[int]:
    return frozenset(d % len(call.shape) for d in call["dims"])


def count(call: Call) -> int:
    return math.prod(call.shape[d] for d in reduced_dims(call))


def draw(rng: Random, shape: Shape) -> dict[str, Any] | None:
    """A dim of at least 8 elements (not the batch), or height and width together; keepdim now and
    then.
    """
    choices: list[tuple[int, ...]] = [
        (d - len(shape),) for d in range(1, len(shape)) if shape[d] >= 8
    ]
    if len(shape) == 4:
        choices.append((-2, -1))
    if not choices:
        return None
    dims = rng.choice(choices)
    text = f"({', '.join(map(str, dims))})" if len(dims) > 1 else str(dims[0])
    return {"dims": dims, "dim": text, "keepdim": len(shape) == 2 or rng.random() < 0.3}


def draw_one(rng: Random, shape: Shape) -> dict[str, Any] | None:
    drawn = draw(rng, shape)
    return drawn if drawn and len(drawn["dims"]) == 1 else None


def shape(call: Call) -> Shape:
    gone = reduced_dims(call)
    if call["keepdim"]:
        return tuple(1 if d in gone else n for d, n in enumerate(call.shape))
    return tuple(n for d, n in enumerate(call.shape) if d not in gone)


def blind_to(*traits: Trait) -> Callable[[Call], Traits]:
    return lambda call: frozenset((t, reduced_dims(call)) for t in (Trait.MOVED, *traits))


def reduction(
    name: str, sample: Rule, doc: str, low: Callable[[Call], float], *blind: Trait, **more: Any
) -> Template:
    fields: dict[str, Any] = {
        "canonical": (name.rsplit(".", 1)[-1],),
        "forward": f"{name}({{x}}, dim={{dim}}, keepdim={{keepdim}})",
        "draw": draw,
        "shape": shape,
        "blind": blind_to(*blind),
    }
    return Template(
        name=name, family="reduction", doc=doc, sample=sample, low=low, **(fields | more)
    )


def same_low(call: Call) -> float:
    return call.x.low


def logsumexp(call: Call) -> Lanes:
    lanes = statistic(log_mean_exp, count)(call)
    return tuple(v + math.log(count(call)) for v in lanes)


MEAN = statistic(mean, count)
NORM = scaled(statistic(rms, count), lambda call: math.sqrt(count(call)))

TEMPLATES: list[Template] = [
    reduction("torch.mean", MEAN, "a mean", same_low, Trait.CENTRED, Trait.SIMPLEX),
    reduction(
        "torch.sum",
        scaled(MEAN, count),
        "a sum",
        lambda call: count(call) * call.x.low,
        Trait.CENTRED,
        Trait.SIMPLEX,
    ),
    reduction("torch.amax", extreme(max, count), "a maximum", same_low, canonical=("max",)),
    reduction("torch.amin", extreme(min, count), "a minimum", same_low, canonical=("min",)),
    reduction(
        "torch.std",
        statistic(std, count),
        "a standard deviation",
        lambda call: 0.0,
        Trait.SHIFTED,
        Trait.CENTRED,
        cost=Cost(cpu_ns=2.0, passes=1.5),
    ),
    reduction(
        "torch.var",
        statistic(lambda x: std(x) ** 2, count),
        "a variance",
        lambda call: 0.0,
        Trait.SHIFTED,
        Trait.CENTRED,
        cost=Cost(cpu_ns=2.0, passes=1.5),
    ),
    reduction(
        "torch.logsumexp",
        logsumexp,
        "a log-sum-exp",
        lambda call: call.x.low,
        Trait.SIMPLEX,
        cost=Cost(cpu_ns=0.6, passes=5.0),
    ),
    reduction("torch.linalg.norm", NORM, "a Euclidean norm", lambda call: 0.0, Trait.CENTRED),
    reduction(
        "torch.norm",
        scaled(statistic(lambda x: mean(tuple(map(abs, x))), count), count),
        "a sum of magnitudes",
        lambda call: 0.0,
        Trait.SIMPLEX,
        forward="torch.norm({x}, p=1, dim={dim}, keepdim={keepdim})",
        variant="l1",
        draw=draw_one,
    ),
]
