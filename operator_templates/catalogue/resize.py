"""Upsampling of signals and images."""

from __future__ import annotations

from random import Random
from typing import Any

from operator_templates.lanes import Rule, same, statistic
from operator_templates.template import Cost, Template
from operator_templates.values import EQUIVARIANT, Call, Shape, mean


def factor(rng: Random, shape: Shape) -> dict[str, Any] | None:
    return {"scale_factor": rng.choice((2, 3))} if min(shape[2:]) >= 4 else None


def enlarged(call: Call) -> Shape:
    return (*call.shape[:2], *(n * call["scale_factor"] for n in call.shape[2:]))


def resize(name: str, doc: str, forward: str, rank: int, sample: Rule, **more: Any) -> Template:
    fields: dict[str, Any] = {
        "canonical": ("interpolate",),
        "keeps": EQUIVARIANT,
        "cost": Cost(cpu_ns=0.5 * rank, passes=1.5),
    }
    return Template(
        name=name,
        family="resize",
        doc=doc,
        forward=forward,
        ranks=(rank,),
        draw=factor,
        shape=enlarged,
        sample=sample,
        **(fields | more),
    )


BLEND = statistic(mean, lambda call: 2)

TEMPLATES: list[Template] = [
    resize(
        "F.interpolate",
        "nearest-neighbour upsampling",
        'F.interpolate({x}, scale_factor={scale_factor}, mode="nearest")',
        4,
        same,
        variant="nearest",
        low=lambda call: call.x.low,
    ),
    resize(
        "F.interpolate",
        "bilinear upsampling",
        'F.interpolate({x}, scale_factor={scale_factor}, mode="bilinear", align_corners=False)',
        4,
        BLEND,
        variant="bilinear",
        low=lambda call: call.x.low,
    ),
    resize(
        "F.interpolate",
        "bicubic upsampling",
        'F.interpolate({x}, scale_factor={scale_factor}, mode="bicubic", align_corners=False)',
        4,
        BLEND,
        variant="bicubic",
        cost=Cost(cpu_ns=6.0, passes=2.5),
    ),
    resize(
        "F.interpolate",
        "linear upsampling",
        'F.interpolate({x}, scale_factor={scale_factor}, mode="linear", align_corners=False)',
        3,
        BLEND,
        variant="linear",
        low=lambda call: call.x.low,
    ),
    resize(
        "F.interpolate",
        "trilinear upsampling",
        'F.interpolate({x}, scale_factor={scale_factor}, mode="trilinear", align_corners=False)',
        5,
        BLEND,
        variant="trilinear",
        low=lambda call: call.x.low,
        cost=Cost(cpu_ns=4.0, passes=2.0),
    ),
]
