"""Losses, per element or per row. A mean over a whole batch hardly moves with its inputs, so none
is taken here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

from operator_templates.catalogue.activation import softplus
from operator_templates.catalogue.softmax import log_softmax_of
from operator_templates.lanes import LANES, Rule, pointwise, rounded, statistic
from operator_templates.template import INDEX, POSITIVE, SIGN, UNIT, Cost, Domain, Operand, Template
from operator_templates.values import Call, Lanes, Shape, Trait, Traits, Value, mean, rms

TARGET = Operand(name="target", joinable=True)


def huber(e: float, delta: float) -> float:
    return 0.5 * e * e if abs(e) < delta else delta * (abs(e) - 0.5 * delta)


def elementwise(
    name: str,
    function: Callable[..., float],
    doc: str,
    *,
    target: Domain | None = None,
    arguments: str = "",
    low: float = 0.0,
    **more: Any,
) -> Template:
    """`F.name(x, target, reduction="none")`."""
    extra = f", {arguments}" if arguments else ""
    fields: dict[str, Any] = {
        "canonical": (name.removeprefix("F."),),
        "forward": f'{name}({{x}}, {{target}}{extra}, reduction="none")',
        "sample": pointwise(function),
        "operands": (TARGET if target is None else Operand(name="target", domain=target),),
        "low": lambda call: low,
        "keeps": frozenset({Trait.MOVED}),
    }
    return Template(name=name, family="loss", doc=doc, **(fields | more))


def by_row(name: str, doc: str, sample: Rule, **more: Any) -> Template:
    """A loss that takes rows of the last dim to one number."""
    fields: dict[str, Any] = {
        "canonical": (name.removeprefix("F."),),
        "operands": (TARGET,),
        "shape": lambda call: call.shape[:-1],
        "draw": lambda rng, shape: {} if shape[-1] >= 8 else None,
        "ranks": (2, 3),
        "blind": moved_rows,
    }
    return Template(name=name, family="loss", doc=doc, sample=sample, **(fields | more))


def moved_rows(call: Call) -> Traits:
    return frozenset({(Trait.SHIFTED, frozenset({len(call.shape) - 1}))})


def cross_entropy(call: Call) -> Lanes:
    """Minus the log-softmax at the target class."""
    scores = log_softmax_of(call.x.lanes, call.shape[1])
    return rounded([-scores[int(u * LANES) % LANES] for u in call.inputs[1].lanes])


def over_rows(call: Call, terms: list[float], function: Callable[[Lanes], float]) -> Lanes:
    """A statistic over rows whose elements are distributed like `terms`."""
    inner = Call(inputs=(Value(shape=call.shape, lanes=rounded(terms)),), salt=call.salt)
    return statistic(function, lambda _: call.shape[-1])(inner)


def cosine(call: Call) -> Lanes:
    x, y = call.x.lanes, call.inputs[1].lanes
    scale = max(rms(x) * rms(y), 1e-12)
    return over_rows(call, [u * v / scale for u, v in zip(x, y, strict=True)], mean)


def distances(call: Call, other: int) -> list[float]:
    gaps = [u - v for u, v in zip(call.x.lanes, call.inputs[other].lanes, strict=True)]
    return [math.sqrt(call.shape[-1]) * v for v in over_rows(call, gaps, rms)]


def pairwise(call: Call) -> Lanes:
    return rounded(distances(call, 1))


def triplet(call: Call) -> Lanes:
    near, far = distances(call, 1), distances(call, 2)
    return rounded([max(0.0, p - n + call["margin"]) for p, n in zip(near, far, strict=True)])


def class_shape(call: Call) -> Shape:
    return (call.shape[0], *call.shape[2:])


def delta(rng: Random, shape: Shape) -> dict[str, Any]:
    return {"delta": rng.choice((0.3, 0.5, 0.8, 1.5))}


TEMPLATES: list[Template] = [
    elementwise("F.mse_loss", lambda x, t, call: (x - t) ** 2, "squared errors"),
    elementwise("F.l1_loss", lambda x, t, call: abs(x - t), "absolute errors"),
    elementwise(
        "F.smooth_l1_loss",
        lambda x, t, call: huber(x - t, call["delta"]) / call["delta"],
        "smooth L1 errors",
        arguments="beta={delta}",
        draw=delta,
    ),
    elementwise(
        "F.huber_loss",
        lambda x, t, call: huber(x - t, call["delta"]),
        "Huber errors",
        arguments="delta={delta}",
        draw=delta,
    ),
    elementwise(
        "F.binary_cross_entropy_with_logits",
        lambda x, t, call: softplus(x) - x * t,
        "binary cross entropies of logits",
        target=UNIT,
        cost=Cost(cpu_ns=2.0, passes=2.0),
    ),
    elementwise(
        "F.soft_margin_loss",
        lambda x, t, call: softplus(-x * t),
        "soft margin losses",
        target=SIGN,
        exponential=True,
        cost=Cost(cpu_ns=2.0, passes=3.0),
    ),
    elementwise(
        "F.hinge_embedding_loss",
        lambda x, t, call: x if t > 0 else max(0.0, 1 - x),
        "hinge embedding losses",
        target=SIGN,
        low=-math.inf,
        cost=Cost(cpu_ns=2.0, passes=4.0),
    ),
    elementwise(
        "F.poisson_nll_loss",
        lambda x, t, call: math.exp(x) - t * x,
        "Poisson likelihoods of log rates",
        target=POSITIVE,
        low=-math.inf,
        exponential=True,
        cost=Cost(cpu_ns=1.0, passes=2.0),
    ),
    elementwise(
        "F.margin_ranking_loss",
        lambda x, o, t, call: max(0.0, -t * (x - o) + call["margin"]),
        "margin ranking losses",
        forward='F.margin_ranking_loss({x}, {other}, {target}, margin={margin}, reduction="none")',
        draw=lambda rng, shape: {"margin": rng.choice((0.25, 0.5, 1.0))},
        operands=(Operand(name="other", joinable=True), Operand(name="target", domain=SIGN)),
        cost=Cost(cpu_ns=1.0, passes=3.0),
    ),
    Template(
        name="F.cross_entropy",
        family="loss",
        doc="cross entropies with class indices",
        canonical=("cross_entropy",),
        forward='F.cross_entropy({x}, {target}, reduction="none")',
        operands=(
            Operand(
                name="target", domain=INDEX, shape=class_shape, below=lambda call: call.shape[1]
            ),
        ),
        ranks=(2, 3, 4),
        shape=class_shape,
        sample=cross_entropy,
        low=lambda call: 0.0,
        draw=lambda rng, shape: {} if shape[1] >= 4 else None,
        blind=lambda call: frozenset({(Trait.SHIFTED, frozenset({1}))}),
        cost=Cost(cpu_ns=0.8, passes=2.2),
    ),
    by_row(
        "F.cosine_similarity",
        "cosine similarities of rows",
        cosine,
        forward="F.cosine_similarity({x}, {target}, dim=-1)",
        cost=Cost(cpu_ns=1.0, passes=4.0),
        blind=lambda call: frozenset({(Trait.SCALED, frozenset({len(call.shape) - 1}))}),
    ),
    by_row(
        "F.pairwise_distance",
        "Euclidean distances of rows",
        pairwise,
        forward="F.pairwise_distance({x}, {target})",
        low=lambda call: 0.0,
        cost=Cost(cpu_ns=0.5, passes=2.0),
        blind=lambda call: frozenset(),
    ),
    by_row(
        "F.triplet_margin_loss",
        "triplet margin losses of rows",
        triplet,
        forward="F.triplet_margin_loss({x}, {target}, {negative}, margin={margin}, "
        'reduction="none")',
        operands=(TARGET, Operand(name="negative")),
        low=lambda call: 0.0,
        draw=lambda rng, shape: {"margin": rng.choice((1.0, 2.0, 3.0))} if shape[-1] >= 8 else None,
        cost=Cost(cpu_ns=1.0, passes=4.0),
        blind=lambda call: frozenset(),
    ),
]
