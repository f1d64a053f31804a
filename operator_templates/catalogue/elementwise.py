"""Elementwise arithmetic: sums, products, powers, logarithms; with tensors, parameters, scalars."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

from operator_templates.lanes import normal, pointwise, rounded
from operator_templates.template import POSITIVE, UNIT, Cost, Operand, Template
from operator_templates.values import Call, Lanes, Shape, Trait

LINEAR = frozenset({Trait.CENTRED, Trait.SHIFTED, Trait.SCALED, Trait.MOVED})
ORDER = frozenset({Trait.MOVED})
OTHER = Operand(name="other", joinable=True)
POSITIVE_OTHER = Operand(name="other", domain=POSITIVE, joinable=True)


def unary(
    name: str,
    function: Callable[[float], float],
    doc: str,
    low: float | Callable[[Call], float] = -math.inf,
    **more: Any,
) -> Template:
    """`torch.name(x)`."""
    call = name.removeprefix("torch.")
    return Template(
        name=name,
        family="elementwise",
        doc=doc,
        **{
            "canonical": (call,),
            "forward": f"{name}({{x}})",
            "sample": pointwise(lambda x, call: function(x)),
            "low": low if callable(low) else lambda call: low,
            "keeps": ORDER,
            **more,
        },
    )


def binary(name: str, function: Callable[[float, float], float], doc: str, **more: Any) -> Template:
    """`torch.name(x, other)`, or the infix form given as `forward`."""
    call = name.removeprefix("torch.")
    return Template(
        name=name,
        family="elementwise",
        doc=doc,
        **{
            "canonical": (call,),
            "forward": f"{name}({{x}}, {{other}})",
            "sample": pointwise(lambda x, y, call: function(x, y)),
            "operands": (OTHER,),
            "keeps": ORDER,
            **more,
        },
    )


def lows(combine: Callable[[float, float], float]) -> Callable[[Call], float]:
    return lambda call: combine(call.inputs[0].low, call.inputs[1].low)


def product_low(a: float, b: float) -> float:
    return a * b if a >= 0 and b >= 0 else -math.inf


def trailing(name: str, rng: Random, shape: Shape) -> dict[str, Any] | None:
    """The size of the last dim (rank 2 and 3) or of the channels (rank 4 and 5)."""
    return {name: shape[-1] if len(shape) < 4 else shape[1]}


def per_channel(combine: Callable[[float, float], float], spread: float) -> Callable[[Call], Lanes]:
    """x combined with a learned vector of normal values."""

    def rule(call: Call) -> Lanes:
        weight = normal(f"{call.salt}/weight")
        return rounded([combine(x, spread * w) for x, w in zip(call.x.lanes, weight, strict=True)])

    return rule


def broadcast(name: str, operator: str, combine: Callable[[float, float], float]) -> list[Template]:
    """x combined with a learned vector: along the last dim, and along the channels of an image."""
    trait = Trait.SHIFTED if operator == "+" else Trait.SCALED
    what = "bias" if operator == "+" else "scale"
    along_last = Template(
        name=name,
        variant=f"{what}_last",
        family="elementwise",
        doc=f"a learned {what} along the last dim",
        canonical=(name.removeprefix("torch."),),
        attribute=what,
        init="nn.Parameter(torch.randn({num_features}{dtype}))",
        forward=f"{{x}} {operator} {{m}}",
        ranks=(2, 3),
        draw=lambda rng, shape: trailing("num_features", rng, shape),
        sample=per_channel(combine, 1.0),
        leaves=lambda call: frozenset({(trait, call.all_dims(but=-1))}),
        keeps=LINEAR - {Trait.CENTRED},
    )
    along_channels = along_last.but(
        variant=f"{what}_channels",
        doc=f"a learned {what} per channel",
        init="nn.Parameter(torch.randn({num_channels}, 1, 1{dtype}))",
        ranks=(4,),
        draw=lambda rng, shape: trailing("num_channels", rng, shape),
        leaves=lambda call: frozenset({(trait, call.all_dims(but=1))}),
    )
    return [along_last, along_channels]


def row_of(call: Call) -> Shape:
    """A vector along the last dim, the same for every row."""
    return call.shape[-1:]


def column_of(call: Call) -> Shape:
    """One number per row, broadcast over the last dim."""
    return (*call.shape[:-1], 1)


SCALARS = (-1.5, -0.5, 0.25, 0.5, 1.5, 2.0, 3.0)

TEMPLATES: list[Template] = [
    binary(
        "torch.add",
        lambda x, y: x + y,
        "a sum",
        forward="{x} + {other}",
        low=lows(lambda a, b: a + b),
        keeps=LINEAR - {Trait.CENTRED},
    ),
    binary(
        "torch.sub",
        lambda x, y: x - y,
        "a difference",
        forward="{x} - {other}",
        keeps=LINEAR - {Trait.CENTRED},
    ),
    binary(
        "torch.mul",
        lambda x, y: x * y,
        "a product",
        forward="{x} * {other}",
        low=lows(product_low),
        keeps=frozenset({Trait.SCALED, Trait.MOVED}),
    ),
    binary(
        "torch.div",
        lambda x, y: x / y,
        "a quotient by positive numbers",
        forward="{x} / {other}",
        operands=(POSITIVE_OTHER,),
    ),
    binary("torch.maximum", max, "the larger of two", low=lows(max)),
    binary("torch.minimum", min, "the smaller of two", low=lows(min)),
    binary(
        "torch.hypot",
        math.hypot,
        "the length of pairs (x, y)",
        low=lambda call: 0.0,
        cost=Cost(cpu_ns=0.5),
    ),
    binary(
        "torch.atan2",
        math.atan2,
        "the angle of pairs (x, y) with positive y",
        operands=(POSITIVE_OTHER,),
        cost=Cost(cpu_ns=0.8),
    ),
    binary(
        "torch.logaddexp",
        lambda x, y: max(x, y) + math.log1p(math.exp(-abs(x - y))),
        "a logarithm of a sum of exponentials",
        cost=Cost(cpu_ns=4.0),
    ),
    binary(
        "torch.xlogy",
        lambda x, y: x * math.log(y),
        "a product with a logarithm of positive numbers",
        operands=(POSITIVE_OTHER,),
        cost=Cost(cpu_ns=4.0),
    ),
    binary(
        "torch.lerp",
        lambda x, y: x + 0.3 * (y - x),
        "a blend of two tensors",
        forward="torch.lerp({x}, {other}, {weight})",
        draw=lambda rng, shape: {"weight": rng.choice((0.2, 0.3, 0.4, 0.6, 0.7))},
        sample=pointwise(lambda x, y, call: x + call["weight"] * (y - x)),
    ),
    binary(
        "torch.addcmul",
        lambda x, y: x,
        "a tensor plus a scaled product",
        forward="torch.addcmul({x}, {other}, {factor}, value={value})",
        operands=(OTHER, Operand(name="factor", joinable=True)),
        draw=lambda rng, shape: {"value": rng.choice((0.5, 0.75, 1.5, 2.0))},
        sample=pointwise(lambda x, y, z, call: x + call["value"] * y * z),
    ),
    binary(
        "torch.addcdiv",
        lambda x, y: x,
        "a tensor plus a scaled quotient",
        forward="torch.addcdiv({x}, {other}, {divisor}, value={value})",
        operands=(OTHER, Operand(name="divisor", domain=POSITIVE)),
        draw=lambda rng, shape: {"value": rng.choice((0.5, 0.75, 1.5))},
        sample=pointwise(lambda x, y, z, call: x + call["value"] * y / z),
    ),
    binary(
        "torch.add",
        lambda x, y: x + y,
        "a row vector added to every row",
        variant="row",
        forward="{x} + {row}",
        operands=(Operand(name="row", shape=row_of),),
        ranks=(2, 3, 4),
        leaves=lambda call: frozenset({(Trait.SHIFTED, call.all_dims(but=-1))}),
        keeps=LINEAR - {Trait.CENTRED},
    ),
    binary(
        "torch.mul",
        lambda x, y: x * y,
        "every row times its own number",
        variant="column",
        forward="{x} * {column}",
        operands=(Operand(name="column", shape=column_of),),
        ranks=(2, 3, 4),
        leaves=lambda call: frozenset({(Trait.SCALED, frozenset({len(call.shape) - 1}))}),
        keeps=LINEAR - {Trait.SIMPLEX},
    ),
    *broadcast("torch.add", "+", lambda x, w: x + w),
    *broadcast("torch.mul", "*", lambda x, w: x * w),
    unary(
        "torch.mul",
        lambda x: x,
        "a constant factor",
        variant="scalar",
        forward="{x} * {factor}",
        draw=lambda rng, shape: {"factor": rng.choice(SCALARS)},
        sample=pointwise(lambda x, call: x * call["factor"]),
        low=lambda call: product_low(call.x.low, call["factor"]),
        leaves=lambda call: frozenset({(Trait.SCALED, call.all_dims())}),
        keeps=LINEAR,
    ),
    unary(
        "torch.add",
        lambda x: x,
        "a constant offset",
        variant="scalar",
        forward="{x} + {offset}",
        draw=lambda rng, shape: {"offset": rng.choice((0.5, 1.0, 1.5, 2.0, 3.0))},
        sample=pointwise(lambda x, call: x + call["offset"]),
        low=lambda call: call.x.low + call["offset"],
        leaves=lambda call: frozenset({(Trait.SHIFTED, call.all_dims())}),
        keeps=LINEAR - {Trait.CENTRED},
    ),
    unary(
        "torch.clamp",
        lambda x: x,
        "a clamp to an interval",
        forward="torch.clamp({x}, min={minimum}, max={maximum})",
        draw=lambda rng, shape: {
            "minimum": rng.choice((-1.5, -1.0, -0.5, 0.0, 0.6)),
            "maximum": rng.choice((0.8, 1.0, 1.25, 2.0)),
        },
        sample=pointwise(lambda x, call: min(max(x, call["minimum"]), call["maximum"])),
        low=lambda call: max(call.x.low, call["minimum"]),
    ),
    unary("torch.abs", abs, "an absolute value", 0.0, keeps=ORDER | {Trait.SCALED}),
    unary("torch.neg", lambda x: -x, "a change of sign", keeps=LINEAR),
    unary("torch.square", lambda x: x * x, "a square", 0.0, keeps=ORDER | {Trait.SCALED}),
    unary(
        "torch.pow",
        lambda x: x,
        "a fractional power of positive numbers",
        domain=POSITIVE,
        forward="torch.pow({x}, {exponent})",
        draw=lambda rng, shape: {"exponent": rng.choice((-1.5, -0.75, 0.3, 0.75, 1.5, 2.5))},
        sample=pointwise(lambda x, call: x ** call["exponent"]),
        low=lambda call: max(call.x.low, 0.0) ** call["exponent"] if call["exponent"] > 0 else 0.0,
        cost=Cost(cpu_ns=1.5),
    ),
    unary(
        "torch.pow",
        lambda x: x**3,
        "a cube",
        variant="cube",
        forward="torch.pow({x}, 3)",
        low=lambda call: max(call.x.low, 0.0) ** 3 if call.x.low >= 0 else -math.inf,
    ),
    unary(
        "torch.sqrt",
        math.sqrt,
        "a square root of non-negative numbers",
        domain=UNIT,
        low=lambda call: math.sqrt(max(call.x.low, 0.0)),
    ),
    unary("torch.rsqrt", lambda x: x**-0.5, "one over a square root", 0.0, domain=POSITIVE),
    unary("torch.reciprocal", lambda x: 1 / x, "one over positive numbers", 0.0, domain=POSITIVE),
    unary("torch.exp", math.exp, "an exponential", 0.0, exponential=True, cost=Cost(cpu_ns=0.4)),
    unary(
        "torch.expm1",
        math.expm1,
        "an exponential minus one",
        -1.0,
        exponential=True,
        cost=Cost(cpu_ns=0.6),
    ),
    unary(
        "torch.log",
        math.log,
        "a logarithm of positive numbers",
        domain=POSITIVE,
        low=lambda call: math.log(max(call.x.low, 1e-30)),
        cost=Cost(cpu_ns=0.4),
    ),
    unary(
        "torch.log1p",
        math.log1p,
        "log(1 + x) of non-negative numbers",
        domain=UNIT,
        low=lambda call: math.log1p(max(call.x.low, 0.0)),
        cost=Cost(cpu_ns=0.8),
    ),
    unary("torch.sin", math.sin, "a sine", -1.0, cost=Cost(cpu_ns=0.5)),
    unary("torch.cos", math.cos, "a cosine", -1.0, cost=Cost(cpu_ns=0.5)),
    unary("torch.atan", math.atan, "an arc tangent", -1.6, cost=Cost(cpu_ns=1.0)),
    unary("torch.asinh", math.asinh, "an inverse hyperbolic sine", cost=Cost(cpu_ns=5.0)),
    unary("torch.sinh", math.sinh, "a hyperbolic sine", exponential=True, cost=Cost(cpu_ns=1.0)),
    unary("torch.erf", math.erf, "an error function", -1.0, cost=Cost(cpu_ns=0.5)),
]
