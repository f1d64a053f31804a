"""Matrix products: linear layers, products with parameters, and products of two inputs."""

from __future__ import annotations

import math
from random import Random
from typing import Any

from operator_templates.lanes import Rule, dot, normal, rounded, weighted
from operator_templates.template import Cost, Operand, Template
from operator_templates.values import Call, Lanes, Shape, Trait, Traits

SCALED_WEIGHT = (
    "nn.Parameter(torch.randn({in_features}, {out_features}{dtype}) / {in_features} ** 0.5)"
)
WIDTHS = (96, 128, 192, 250, 256, 320, 384, 500, 512, 640, 768, 1000, 1024, 1536, 2048, 3072, 4096)


def features(rng: Random, shape: Shape) -> dict[str, Any] | None:
    if shape[-1] < 16:
        return None
    return {"in_features": shape[-1], "out_features": rng.choice([*WIDTHS, shape[-1], shape[-1]])}


def last_dim(call: Call) -> int:
    return call.shape[-1]


def new_width(call: Call) -> Shape:
    return (*call.shape[:-1], call["out_features"])


def linear_flops(call: Call) -> int:
    return 2 * call.x.numel * int(call["out_features"])


def bias_trait(call: Call) -> Traits:
    return frozenset({(Trait.SHIFTED, call.all_dims(but=-1))})


def by_parameter(call: Call) -> Lanes:
    """A weight drawn as randn / sqrt(in_features)."""
    k = call.shape[-1]
    w = tuple(v / math.sqrt(k) for v in normal(f"{call.salt}/weight"))
    return dot(call.x.lanes, w, k, call.salt)


def by_input(call: Call) -> Lanes:
    return dot(call.x.lanes, call.inputs[1].lanes, call.shape[-1], call.salt)


def product_width(rng: Random, shape: Shape) -> dict[str, Any] | None:
    return {"n": rng.choice([*WIDTHS, shape[-1]])} if 16 <= shape[-1] <= 2048 else None


def right_matrix(call: Call) -> Shape:
    return (call.shape[-1], call["n"])


def right_batch(call: Call) -> Shape:
    return (*call.shape[:-2], call.shape[-1], call["n"])


def product_shape(call: Call) -> Shape:
    return (*call.shape[:-1], call["n"])


def product_flops(call: Call) -> int:
    return 2 * call.x.numel * int(call["n"])


def add_row(call: Call) -> Lanes:
    """row + x @ weight, the weight as in `by_parameter`."""
    return rounded([p + r for p, r in zip(by_parameter(call), call.inputs[1].lanes, strict=True)])


def out_row(call: Call) -> Shape:
    return (call["out_features"],)


def scaled_product(call: Call) -> Lanes:
    """baddbmm with alpha = 1/sqrt(k): an input plus a scaled product of two inputs."""
    product = dot(call.x.lanes, call.inputs[1].lanes, call.shape[-1], call.salt)
    return rounded(
        [p * call["alpha"] + b for p, b in zip(product, call.inputs[2].lanes, strict=True)]
    )


def matmul(name: str, doc: str, sample: Rule, **more: Any) -> Template:
    fields: dict[str, Any] = {
        "canonical": ("matmul",),
        "ranks": (2, 3),
        "draw": features,
        "shape": new_width,
        "cost": Cost(flops=linear_flops),
        "dense": True,
    }
    return Template(name=name, family="matmul", doc=doc, sample=sample, **(fields | more))


PRODUCT: dict[str, Any] = {
    "draw": product_width,
    "shape": product_shape,
    "cost": Cost(flops=product_flops),
}


def alpha(rng: Random, shape: Shape) -> dict[str, Any] | None:
    drawn = product_width(rng, shape)
    return drawn and drawn | {"alpha": float(f"{shape[-1] ** -0.5:.3g}")}


TEMPLATES: list[Template] = [
    matmul(
        "nn.Linear",
        "a linear layer",
        weighted(last_dim, bias=True),
        canonical=("linear",),
        init="nn.Linear({in_features}, {out_features}{dtype})",
        attribute="linear",
        forward="{m}({x})",
        leaves=bias_trait,
        ranks=(2, 3, 4),
    ),
    matmul(
        "nn.Linear",
        "a linear layer without bias",
        weighted(last_dim, bias=False),
        canonical=("linear",),
        variant="no_bias",
        init="nn.Linear({in_features}, {out_features}, bias=False{dtype})",
        attribute="proj",
        forward="{m}({x})",
        ranks=(2, 3, 4),
    ),
    matmul(
        "torch.matmul",
        "a product with a learned matrix",
        by_parameter,
        variant="parameter",
        init=SCALED_WEIGHT,
        attribute="weight",
        forward="torch.matmul({x}, {m})",
    ),
    matmul(
        "torch.addmm",
        "a row plus a product with a learned matrix",
        add_row,
        canonical=("addmm",),
        init=SCALED_WEIGHT,
        attribute="weight",
        operands=(Operand(name="row", shape=out_row),),
        forward="torch.addmm({row}, {x}, {m})",
        ranks=(2,),
        leaves=bias_trait,
    ),
    matmul(
        "torch.matmul",
        "a product with a second input",
        by_input,
        variant="input",
        operands=(Operand(name="weight", shape=right_matrix),),
        forward="torch.matmul({x}, {weight})",
        **PRODUCT,
    ),
    matmul(
        "torch.mm",
        "a product of two matrices",
        by_input,
        operands=(Operand(name="weight", shape=right_matrix),),
        forward="torch.mm({x}, {weight})",
        **(PRODUCT | {"ranks": (2,)}),
    ),
    matmul(
        "torch.bmm",
        "a batched product of two inputs",
        by_input,
        operands=(Operand(name="other", shape=right_batch),),
        forward="torch.bmm({x}, {other})",
        **(PRODUCT | {"ranks": (3,)}),
    ),
    matmul(
        "torch.baddbmm",
        "a tensor plus a scaled batched product",
        scaled_product,
        canonical=("baddbmm",),
        operands=(
            Operand(name="other", shape=right_batch),
            Operand(name="base", shape=product_shape),
        ),
        forward="torch.baddbmm({base}, {x}, {other}, alpha={alpha})",
        **(PRODUCT | {"ranks": (3,), "draw": alpha}),
    ),
]
