"""Rules for reductions over dimensions, the norms built from them, and scans along one
dimension."""

from __future__ import annotations

import math
from typing import Any

from kernel_agent.expert.index import Index
from kernel_agent.expert.ir import Builder, Expr, Map, Reduce, Scan, Value, cast, const
from kernel_agent.expert.lower_pointwise import op, power
from kernel_agent.expert.lower_views import reshape
from kernel_agent.expert.lowering import (
    Node,
    as_expr,
    normal_dim,
    normal_dims,
    numel,
    pointwise,
    rule,
)


def reduce(
    node: Node, x: Value, dims: Any, kind: str, name: str | None = None, dtype: str | None = None
) -> Reduce:
    """The reduction of x over dims, without keeping them."""
    axes = normal_dims(dims, len(x.shape))
    if not x.shape:  # a scalar: a reduction over one step
        x, axes = reshape(Node(f"{node.name}_in", "view", (1,), x.dtype), x), (0,)
    out_dtype = dtype or node.dtype
    work = Node(node.name, node.op, (), out_dtype).type

    def body(b: Builder, index: tuple[Index, ...]) -> Expr:
        return b.load(x, index) if kind in ("argmax", "argmin") else cast(b.load(x, index), work)

    kept = tuple(size for d, size in enumerate(x.shape) if d not in axes)
    return Reduce(name or node.name, kept, out_dtype, kind, x.shape, axes, body, (x,), node.op)


def shaped(node: Node, value: Value) -> Value:
    """`value` under the node's shape (keepdim)."""
    if value.shape == tuple(node.shape):
        return value
    return reshape(Node(f"{node.name}_keep", "view", node.shape, value.dtype), value)


def _simple(kind: str) -> Any:
    def lower(node: Node, x: Value, dims: Any = None, keepdim: bool = False, **_: Any) -> Value:
        return shaped(node, reduce(node, x, dims, kind))

    return lower


rule("sum", "sum.dim_IntList", "prims::sum")(_simple("sum"))
rule("amax", "max", "prims::amax")(_simple("max"))
rule("amin", "min", "prims::amin")(_simple("min"))
rule("prod", "prod.dim_int", "prims::prod")(_simple("prod"))
rule("any", "any.dim", "any.dims")(_simple("any"))
rule("all", "all.dim", "all.dims")(_simple("all"))
rule("argmax")(_simple("argmax"))
rule("argmin")(_simple("argmin"))


@rule("mean", "mean.dim")
def _mean(node: Node, x: Value, dims: Any = None, keepdim: bool = False, **_: Any) -> Value:
    return shaped(node, mean(node, x, dims, node.name))


def mean(node: Node, x: Value, dims: Any, name: str) -> Map:
    total = reduce(node, x, dims, "sum", f"{name}_sum", _wide(node.dtype))
    count = numel(x.shape) // numel(total.shape)
    part = Node(name, "mean", total.shape, node.dtype)
    return pointwise(part, lambda a: op("mul", a, const(1.0 / count, a.type)), total)


def _wide(dtype: str) -> str:
    """A sum that something else is computed from is kept in float, as eager keeps it inside its
    kernel."""
    return "float32" if dtype in ("bfloat16", "float16") else dtype


@rule("prims::var", "var.correction", "var.dim", "var")
def _var(
    node: Node,
    x: Value,
    dims: Any = None,
    correction: float | None = 1,
    keepdim: bool = False,
    **_: Any,
) -> Value:
    return shaped(node, variance(node, x, dims, 1 if correction is None else float(correction)))


def variance(node: Node, x: Value, dims: Any, correction: float) -> Value:
    """Two passes: the mean, then the mean squared distance from it."""
    wide = Node(node.name, node.op, node.shape, _wide(node.dtype))
    center = mean(wide, x, dims, f"{node.name}_mean")
    axes = normal_dims(dims, len(x.shape))

    def distance(b: Builder, index: tuple[Index, ...]) -> Expr:
        kept = [i for d, i in enumerate(index) if d not in axes]
        e = cast(b.load(x, index), center.type)
        return power(op("sub", e, b.load(center, kept)), 2)

    squares = Map(f"{node.name}_sq", x.shape, wide.dtype, distance, (x, center), node.op)
    total = reduce(wide, squares, axes, "sum", f"{node.name}_sqsum")
    count = numel(x.shape) // numel(total.shape) - correction
    scale = 1.0 / count if count > 0 else math.nan
    part = Node(node.name, "var", total.shape, node.dtype)
    return pointwise(part, lambda a: op("mul", a, const(scale, a.type)), total)


@rule("var_mean.correction", "prims::var_mean")
def _var_mean(
    node: Node, x: Value, dims: Any = None, correction: Any = 1, keepdim: bool = False
) -> list[Value]:
    first = Node(f"{node.name}_0", node.op, node.shape[0], node.dtype[0])
    second = Node(f"{node.name}_1", node.op, node.shape[1], node.dtype[1])
    return [_var(first, x, dims, correction), shaped(second, mean(second, x, dims, second.name))]


def _with_indices(kind: str) -> Any:
    def lower(node: Node, x: Value, dim: int, keepdim: bool = False) -> list[Value]:
        first = Node(f"{node.name}_0", node.op, node.shape[0], node.dtype[0])
        second = Node(f"{node.name}_1", node.op, node.shape[1], node.dtype[1])
        values = shaped(first, reduce(first, x, dim, kind))
        return [values, shaped(second, reduce(second, x, dim, f"arg{kind}"))]

    return lower


rule("max.dim")(_with_indices("max"))
rule("min.dim")(_with_indices("min"))


@rule("logsumexp")
def _logsumexp(node: Node, x: Value, dims: Any, keepdim: bool = False) -> Value:
    axes = normal_dims(dims, len(x.shape))
    wide = Node(node.name, node.op, node.shape, _wide(node.dtype))
    top = reduce(wide, x, axes, "max", f"{node.name}_max")
    finite = Node(f"{node.name}_shift", node.op, top.shape, wide.dtype)
    zero_inf = pointwise(finite, _zero_where_infinite, top)

    def shifted(b: Builder, index: tuple[Index, ...]) -> Expr:
        kept = [i for d, i in enumerate(index) if d not in axes]
        return op("exp", op("sub", cast(b.load(x, index), wide.type), b.load(zero_inf, kept)))

    powers = Map(f"{node.name}_exp", x.shape, wide.dtype, shifted, (x, zero_inf), node.op)
    total = reduce(wide, powers, axes, "sum", f"{node.name}_sum")
    part = Node(node.name, node.op, total.shape, node.dtype)
    return shaped(node, pointwise(part, lambda a, m: op("add", op("log", a), m), total, zero_inf))


def _zero_where_infinite(a: Expr) -> Expr:
    from kernel_agent.expert.ir import expr

    infinite = expr("eq", (op("abs", a), const(math.inf, a.type)), "bool")
    return expr("where", (infinite, const(0, a.type), a), a.type)


def scan(node: Node, x: Value, dim: int, kind: str, name: str, dtype: str) -> Scan:
    axis = normal_dim(dim, len(x.shape))
    work = Node(name, node.op, (), dtype).type

    def body(b: Builder, index: tuple[Index, ...]) -> Expr:
        return as_expr(b, x, index, work)

    return Scan(name, x.shape, dtype, kind, axis, body, (x,), node.op)


def _scan(kind: str) -> Any:
    def lower(node: Node, x: Value, dim: int, **_: Any) -> Value:
        return scan(node, x, dim, kind, node.name, node.dtype)

    return lower


rule("cumsum")(_scan("sum"))
rule("cumprod")(_scan("prod"))
rule("logcumsumexp")(_scan("logaddexp"))


def _scan_values(kind: str) -> Any:
    def lower(node: Node, x: Value, dim: int) -> list[Any]:
        return [scan(node, x, dim, kind, node.name, node.dtype[0]), None]

    return lower


rule("cummax")(_scan_values("max"))
rule("cummin")(_scan_values("min"))
