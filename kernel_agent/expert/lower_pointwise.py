# ruff: noqa: SIM905 - a word list reads better whole
"""Rules for pointwise operators: arithmetic, comparisons, functions, choices, constants."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from kernel_agent.expert.index import Index
from kernel_agent.expert.ir import COMPUTE, RANK, Builder, Expr, Map, Value, cast, const, expr
from kernel_agent.expert.lowering import Node, as_expr, operand_index, pointwise, rule, tensors

UNARY = """exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh
atanh erf erfc sqrt rsqrt reciprocal sigmoid neg abs sign floor ceil trunc round
relu lgamma""".split()
COMPARE = {"eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge"}


def _unary(name: str) -> Callable[..., Any]:
    def lower(node: Node, x: Value) -> Map:
        return pointwise(node, lambda a: op(name, a), x)

    return lower


def op(name: str, *args: Expr) -> Expr:
    """An operation whose result has the type of its arguments."""
    return expr(name, args, args[0].type)


def _compare(name: str) -> Callable[..., Any]:
    def lower(node: Node, x: Value, other: Any) -> Map:
        work = _meeting_type(x, other)
        return pointwise(node, lambda a, b: expr(name, (a, b), "bool"), x, other, type=work)

    return lower


def _meeting_type(*operands: Any) -> str:
    kinds = [o.type if isinstance(o, Value) else _number_type(o) for o in operands]
    return max(kinds, key=RANK.index)


def _number_type(number: Any) -> str:
    return "bool" if isinstance(number, bool) else "int" if isinstance(number, int) else "float"


for _name in UNARY:
    rule(_name)(_unary(_name))
for _name, _word in COMPARE.items():
    rule(f"{_name}.Tensor", f"{_name}.Scalar", f"prims::{_name}")(_compare(_word))


@rule("add.Tensor", "add.Scalar", "prims::add")
def _add(node: Node, x: Any, y: Any, alpha: float = 1) -> Map:
    if node.type == "bool":
        return pointwise(node, lambda a, b: op("or", a, b), x, y)
    return pointwise(node, lambda a, b: op("add", a, _scaled(b, alpha)), x, y)


@rule("sub.Tensor", "sub.Scalar", "prims::sub")
def _sub(node: Node, x: Any, y: Any, alpha: float = 1) -> Map:
    return pointwise(node, lambda a, b: op("sub", a, _scaled(b, alpha)), x, y)


@rule("rsub.Tensor", "rsub.Scalar")
def _rsub(node: Node, x: Any, y: Any, alpha: float = 1) -> Map:
    return pointwise(node, lambda a, b: op("sub", b, _scaled(a, alpha)), x, y)


def _scaled(e: Expr, alpha: float) -> Expr:
    return e if alpha == 1 else op("mul", e, const(alpha, e.type))


@rule("mul.Tensor", "mul.Scalar", "prims::mul")
def _mul(node: Node, x: Any, y: Any) -> Map:
    name = "and" if node.type == "bool" else "mul"
    return pointwise(node, lambda a, b: op(name, a, b), x, y)


@rule(
    "div.Tensor",
    "div.Scalar",
    "div.Tensor_mode",
    "div.Scalar_mode",
    "prims::div",
    "true_divide.Tensor",
)
def _div(node: Node, x: Any, y: Any, rounding_mode: str | None = None) -> Map:
    def divide(a: Expr, b: Expr) -> Expr:
        if rounding_mode is None:
            return op("div", a, b)
        if node.type == "int":
            return op("floordiv" if rounding_mode == "floor" else "div", a, b)
        return op(rounding_mode, op("div", a, b))

    return pointwise(node, divide, x, y)


@rule("floor_divide", "floor_divide.Scalar")
def _floor_divide(node: Node, x: Any, y: Any) -> Map:
    return _div(node, x, y, "floor")


@rule("remainder.Scalar", "remainder.Tensor")
def _remainder(node: Node, x: Any, y: Any) -> Map:
    return pointwise(node, lambda a, b: op("remainder", a, b), x, y)


@rule("fmod.Scalar", "fmod.Tensor", "prims::fmod")
def _fmod(node: Node, x: Any, y: Any) -> Map:
    return pointwise(node, lambda a, b: op("fmod", a, b), x, y)


@rule("maximum", "prims::maximum")
def _maximum(node: Node, x: Any, y: Any) -> Map:
    return pointwise(node, lambda a, b: op("max", a, b), x, y)


@rule("minimum", "prims::minimum")
def _minimum(node: Node, x: Any, y: Any) -> Map:
    return pointwise(node, lambda a, b: op("min", a, b), x, y)


for _name in ("atan2", "hypot", "copysign", "fmax", "fmin"):
    rule(_name, f"{_name}.Tensor")(
        lambda node, x, y, name=_name: pointwise(node, lambda a, b: op(name, a, b), x, y)
    )


@rule("clamp", "clamp.Tensor", "clamp_min", "clamp_min.Tensor", "hardtanh")
def _clamp(node: Node, x: Value, min: Any = None, max: Any = None) -> Map:
    def body(b: Builder, index: tuple[Index, ...]) -> Expr:
        e = as_expr(b, x, index, node.type)
        if min is not None:
            e = op("max", e, as_expr(b, min, index, node.type))
        return e if max is None else op("min", e, as_expr(b, max, index, node.type))

    return Map(node.name, node.shape, node.dtype, body, tensors(x, min, max), node.op)


@rule("clamp_max", "clamp_max.Tensor")
def _clamp_max(node: Node, x: Value, max: Any) -> Map:
    return _clamp(node, x, None, max)


@rule("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar")
def _pow(node: Node, x: Any, y: Any) -> Map:
    if isinstance(y, Value):
        return pointwise(node, lambda a, b: op("pow", a, b), x, y)
    return pointwise(node, lambda a: power(a, y), x)


def power(a: Expr, exponent: float) -> Expr:
    """a ** exponent for a known exponent, without a call where there is a cheaper way."""
    if exponent == 1:
        return a
    if exponent == 2:
        return op("mul", a, a)
    if exponent == 3:
        return op("mul", op("mul", a, a), a)
    if exponent == 4:
        return power(power(a, 2), 2)
    if exponent == 0:
        return const(1, a.type)
    special = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}.get(exponent)
    if special and a.type != "int":
        return op(special, a)
    if exponent == -2 and a.type != "int":
        return op("reciprocal", power(a, 2))
    return op("pow", a, const(exponent, a.type))


@rule("where.self", "where.ScalarOther", "where.ScalarSelf")
def _where(node: Node, condition: Value, x: Any, y: Any) -> Map:
    def body(b: Builder, index: tuple[Index, ...]) -> Expr:
        test = cast(b.load(condition, operand_index(index, condition.shape)), "bool")
        parts = [as_expr(b, part, index, node.type) for part in (x, y)]
        return expr("where", (test, *parts), node.type)

    return Map(node.name, node.shape, node.dtype, body, tensors(condition, x, y), node.op)


@rule("logical_not", "bitwise_not")
def _not(node: Node, x: Value) -> Map:
    if node.op == "bitwise_not" and node.type == "int":
        raise node.unsupported("on integers")
    return pointwise(node, lambda a: op("not", a), x, type="bool")


def _logical(name: str) -> Callable[..., Any]:
    def lower(node: Node, x: Value, y: Any) -> Map:
        if node.type != "bool":
            raise node.unsupported("on integers")
        return pointwise(node, lambda a, b: op(name, a, b), x, y, type="bool")

    return lower


for _name in ("and", "or", "xor"):
    rule(f"logical_{_name}", f"bitwise_{_name}.Tensor", f"bitwise_{_name}.Scalar")(_logical(_name))


@rule("isnan")
def _isnan(node: Node, x: Value) -> Map:
    return pointwise(node, lambda a: expr("ne", (a, a), "bool"), x, type=x.type)


@rule("isinf")
def _isinf(node: Node, x: Value) -> Map:
    def test(a: Expr) -> Expr:
        return expr("eq", (op("abs", a), const(math.inf, a.type)), "bool")

    return pointwise(node, test, x, type=x.type)


@rule("isfinite")
def _isfinite(node: Node, x: Value) -> Map:
    def test(a: Expr) -> Expr:  # false for NaN too
        return expr("lt", (op("abs", a), const(math.inf, a.type)), "bool")

    return pointwise(node, test, x, type=x.type)


@rule("_to_copy", "prims::convert_element_type", "to.dtype")
def _convert(node: Node, x: Value, *_: Any, **__: Any) -> Map:
    # Fused kernels keep float where eager would round to bfloat16: closer to the exact result.
    def body(b: Builder, index: tuple[Index, ...]) -> Expr:
        return cast(b.load(x, index), COMPUTE[node.dtype])

    return Map(node.name, node.shape, node.dtype, body, (x,), node.op, view=x.type == node.type)


@rule("full", "full_like", "scalar_tensor", "new_full", "fill.Scalar")
def _full(node: Node, first: Any, value: Any = None, **_: Any) -> Map:
    number = first if node.op == "scalar_tensor" else value
    return _constant_map(node, number)


def _constant_map(node: Node, number: Any) -> Map:
    def body(b: Builder, index: tuple[Index, ...]) -> Expr:
        return const(number, node.type)

    return Map(node.name, node.shape, node.dtype, body, (), node.op, view=True)


@rule(
    "zeros",
    "zeros_like",
    "new_zeros",
    "empty.memory_format",
    "empty_like",
    "empty_permuted",
    "new_empty",
)
def _zeros(node: Node, *_: Any, **__: Any) -> Map:
    return _constant_map(node, 0)


@rule("ones", "ones_like", "new_ones")
def _ones(node: Node, *_: Any, **__: Any) -> Map:
    return _constant_map(node, 1)


@rule("prims::iota")
def _iota(node: Node, length: int, start: int = 0, step: int = 1, **_: Any) -> Map:
    def body(b: Builder, index: tuple[Index, ...]) -> Expr:
        return cast(expr("index", (), "int", index[0] * step + start), node.type)

    return Map(node.name, node.shape, node.dtype, body, (), node.op, view=True)


@rule("arange", "arange.start", "arange.start_step")
def _arange(node: Node, *bounds: Any, **_: Any) -> Map:
    start, step = (bounds[0] if len(bounds) > 1 else 0), (bounds[2] if len(bounds) > 2 else 1)
    if not isinstance(start, int) or not isinstance(step, int):
        raise node.unsupported("with a fractional step")
    return _iota(node, node.shape[0], start, step)


@rule("constant")
def _constant(node: Node, values: list[Any] | None) -> Map:
    if values is None:
        raise node.unsupported("a literal tensor that is large or computed")

    def body(b: Builder, index: tuple[Index, ...]) -> Expr:
        from kernel_agent.expert.index import linearize  # small tables only

        at = expr("index", (), "int", linearize(index, node.shape))
        out = const(values[-1], node.type)
        for position in range(len(values) - 2, -1, -1):
            test = expr("eq", (at, const(position, "int")), "bool")
            out = expr("where", (test, const(values[position], node.type), out), node.type)
        return out

    return Map(node.name, node.shape, node.dtype, body, (), node.op)


@rule("sigmoid_backward", "native_dropout")
def _refuse(node: Node, *_: Any, **__: Any) -> Map:
    raise node.unsupported("does not belong in a forward pass")
