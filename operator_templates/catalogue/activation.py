"""Activations, as modules and as functions. Those with a jump (hardshrink, threshold) are left out:
in bf16 they flip.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from operator_templates.lanes import normal, pointwise, rounded, shuffled
from operator_templates.template import Cost, Template
from operator_templates.values import Call, Lanes, Shape, Trait

ORDER = frozenset({Trait.MOVED})
SCALE = frozenset({Trait.MOVED, Trait.SCALED})


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def gelu(x: float) -> float:
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


def elu(x: float, alpha: float = 1.0) -> float:
    return x if x > 0 else alpha * math.expm1(x)


def selu(x: float) -> float:
    return 1.0507009873554805 * elu(x, 1.6732632423543772)


def clamp01(x: float) -> float:
    return min(max(x, 0.0), 1.0)


def softshrink(x: float, threshold: float) -> float:
    return math.copysign(max(abs(x) - threshold, 0.0), x)


def activation(
    name: str,
    function: Callable[..., float],
    doc: str,
    low: float = -math.inf,
    *,
    call: str = "",
    arguments: str = "",
    cpu_ns: float = 0.3,
    **more: Any,
) -> Template:
    """An activation; `nn.` names become modules, others are called on x. `function` takes x, or x
    and the call.
    """
    is_module = name.startswith("nn.")
    spelled = name.rsplit(".", 1)[-1]
    fields: dict[str, Any] = {
        "canonical": (call or spelled,),
        "forward": "{m}({x})"
        if is_module
        else f"{name}({{x}}{', ' if arguments else ''}{arguments})",
        "sample": pointwise(function if "draw" in more else lambda x, call: function(x)),
        "low": lambda call: low,
        "keeps": ORDER,
        "cost": Cost(cpu_ns=cpu_ns),
    }
    if is_module:
        fields |= {"init": f"{name}({arguments})", "attribute": "act"}
    return Template(name=name, family="activation", doc=doc, **(fields | more))


def halves(call: Call) -> Lanes:
    """First half times the sigmoid of the second."""
    gate = shuffled(call)
    return tuple(float(f"{x * sigmoid(g):.6g}") for x, g in zip(call.x.lanes, gate, strict=True))


def prelu(call: Call) -> Lanes:
    """Slopes around 0.25, as they are once learned."""
    slopes = normal(f"{call.salt}/slope")
    return rounded(
        [x if x > 0 else 0.25 * (1 + s) * x for x, s in zip(call.x.lanes, slopes, strict=True)]
    )


def half(call: Call) -> Shape:
    return (*call.shape[:-1], call.shape[-1] // 2)


TEMPLATES: list[Template] = [
    activation("nn.ReLU", lambda x: max(x, 0.0), "ReLU", 0.0, call="relu", cpu_ns=0, keeps=SCALE),
    activation("F.relu6", lambda x: min(max(x, 0.0), 6.0), "ReLU6", 0.0, cpu_ns=0),
    activation(
        "F.leaky_relu",
        lambda x, call: x if x > 0 else call["slope"] * x,
        "leaky ReLU",
        arguments="negative_slope={slope}",
        cpu_ns=0,
        keeps=SCALE,
        draw=lambda rng, shape: {"slope": rng.choice((0.01, 0.05, 0.1, 0.2))},
    ),
    activation("nn.GELU", gelu, "exact GELU", -0.17, call="gelu"),
    activation(
        "F.gelu",
        lambda x: 0.5 * x * (1 + math.tanh(0.7978845608 * (x + 0.044715 * x**3))),
        "GELU with the tanh approximation",
        -0.18,
        arguments='approximate="tanh"',
        cpu_ns=0.7,
    ),
    activation("F.silu", lambda x: x * sigmoid(x), "SiLU", -0.28),
    activation("nn.SiLU", lambda x: x * sigmoid(x), "SiLU", -0.28, call="silu"),
    activation(
        "nn.ELU",
        lambda x, call: elu(x, call["alpha"]),
        "ELU",
        -1.5,
        call="elu",
        arguments="alpha={alpha}",
        draw=lambda rng, shape: {"alpha": rng.choice((0.5, 0.75, 1.0, 1.5))},
    ),
    activation("F.selu", selu, "SELU", -1.76),
    activation(
        "nn.CELU",
        lambda x, call: max(x, 0.0) + min(0.0, call["alpha"] * math.expm1(x / call["alpha"])),
        "CELU",
        -2.0,
        call="celu",
        arguments="alpha={alpha}",
        draw=lambda rng, shape: {"alpha": rng.choice((0.5, 0.75, 1.5, 2.0))},
    ),
    activation(
        "nn.Mish", lambda x: x * math.tanh(softplus(x)), "Mish", -0.31, call="mish", cpu_ns=1.5
    ),
    activation("F.hardswish", lambda x: x * clamp01(x / 6 + 0.5), "hard swish", -0.38, cpu_ns=0),
    activation(
        "nn.Hardswish",
        lambda x: x * clamp01(x / 6 + 0.5),
        "hard swish",
        -0.38,
        call="hardswish",
        cpu_ns=0,
    ),
    activation(
        "nn.Hardsigmoid",
        lambda x: clamp01(x / 6 + 0.5),
        "hard sigmoid",
        0.0,
        call="hardsigmoid",
        cpu_ns=0,
    ),
    activation(
        "F.hardtanh",
        lambda x, call: min(max(x, call["minimum"]), call["maximum"]),
        "hard tanh",
        -2.0,
        arguments="min_val={minimum}, max_val={maximum}",
        cpu_ns=0,
        draw=lambda rng, shape: {
            "minimum": rng.choice((-1.5, -1.0, -0.5)),
            "maximum": rng.choice((0.5, 1.0, 1.5)),
        },
    ),
    activation("torch.sigmoid", sigmoid, "a sigmoid", 0.0),
    activation("torch.tanh", math.tanh, "a tanh", -1.0, cpu_ns=0.8),
    activation("nn.Tanh", math.tanh, "a tanh", -1.0, call="tanh", cpu_ns=0.8),
    activation(
        "F.softplus",
        lambda x, call: softplus(call["beta"] * x) / call["beta"],
        "softplus",
        0.0,
        arguments="beta={beta}",
        cpu_ns=1.0,
        draw=lambda rng, shape: {"beta": rng.choice((0.5, 1.0, 1.5, 2.0))},
    ),
    activation(
        "F.softsign",
        lambda x: x / (1 + abs(x)),
        "softsign",
        -1.0,
        cost=Cost(cpu_ns=0.5, passes=3.0),
    ),
    activation("F.logsigmoid", lambda x: -softplus(-x), "log sigmoid", cpu_ns=4.0),
    activation(
        "F.tanhshrink",
        lambda x: x - math.tanh(x),
        "tanh shrinkage",
        cost=Cost(cpu_ns=1.0, passes=2.2),
    ),
    activation(
        "nn.Softshrink",
        lambda x, call: softshrink(x, call["threshold"]),
        "soft shrinkage",
        call="softshrink",
        arguments="{threshold}",
        cpu_ns=0,
        draw=lambda rng, shape: {"threshold": rng.choice((0.2, 0.3, 0.5))},
    ),
    activation(
        "nn.PReLU",
        lambda x: x,
        "PReLU with one slope per channel",
        call="prelu",
        arguments="{num_parameters}{dtype}",
        cpu_ns=0,
        sample=prelu,
        keeps=SCALE,
        draw=lambda rng, shape: {"num_parameters": shape[1]},
    ),
    activation(
        "F.glu",
        lambda x: x,
        "a gated linear unit over the last dim",
        arguments="dim=-1",
        sample=halves,
        shape=half,
        keeps=frozenset(),
        draw=lambda rng, shape: {} if shape[-1] % 2 == 0 else None,
    ),
]
