"""Scaled dot-product attention over heads."""

from __future__ import annotations

import math
from random import Random
from typing import Any

from operator_templates.lanes import dot, groups, rounded
from operator_templates.template import WIDE, Cost, Operand, Template
from operator_templates.values import Call, Lanes, Shape


def heads(rng: Random, shape: Shape) -> dict[str, Any] | None:
    """(batch, heads, keys, head size), at most 512 keys: averages over more are close to zero."""
    fits = shape[3] in (32, 40, 48, 64, 80, 96, 128) and 32 <= shape[2] <= 512
    return {} if fits else None


def attended(call: Call) -> Lanes:
    """Softmax-weighted averages of the values, the scores being dot products over the head size."""
    query, key, value = (v.lanes for v in call.inputs)
    width = call.shape[-1]
    scores = [s / math.sqrt(width) for s in dot(query, key, width, call.salt)]
    weights = [math.exp(s - max(scores)) for s in scores]
    out = []
    for group in groups(f"{call.salt}/keys", 48):
        total = math.fsum(weights[j] for j in group)
        out.append(math.fsum(weights[j] * value[j] for j in group) / total)
    middle = math.fsum(out) / len(out)
    shrink = math.sqrt(min(1.0, 48 / call.shape[2]))
    return rounded([middle + (v - middle) * shrink for v in out])


def attention_flops(call: Call) -> int:
    return 4 * call.x.numel * call.shape[2]


TEMPLATES: list[Template] = [
    Template(
        name="F.scaled_dot_product_attention",
        family="attention",
        doc="scaled dot-product attention",
        canonical=("scaled_dot_product_attention",),
        ranks=(4,),
        draw=heads,
        domain=WIDE,
        forward="F.scaled_dot_product_attention({x}, {key}, {value})",
        operands=(Operand(name="key", domain=WIDE), Operand(name="value", domain=WIDE)),
        sample=attended,
        cost=Cost(cpu_ns=2.0, passes=2.0, flops=attention_flops),
        dense=True,
    ),
]
