"""Rules for operators that read positions from an integer tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernel_agent.expert.index import Index, Indirect, lift
from kernel_agent.expert.ir import Body, Builder, Expr, Map, Reduce, Value, cast, const, expr
from kernel_agent.expert.lower_pointwise import op
from kernel_agent.expert.lowering import Node, normal_dim, operand_index, rule


def as_index(e: Expr, size: int, wrap: bool) -> Index:
    """An integer value as a position below `size`. Arithmetic on loop variables stays arithmetic;
    anything else is an indirect read, with -1 meaning the last position where `wrap` says so."""
    affine = _affine(e)
    if affine is not None:
        low, high = affine.bounds
        if low >= 0 and high < size:
            return affine
        if wrap and high < 0 and low >= -size:
            return affine + size
    if wrap:
        negative = expr("lt", (e, const(0, "int")), "bool")
        e = expr("where", (negative, op("add", e, const(size, "int")), e), "int")
    return Index(((Indirect(e, size), 1),), 0)


def _affine(e: Expr) -> Index | None:
    if e.op == "index":
        return e.attr if isinstance(e.attr, Index) else None
    if e.op == "const" and e.type == "int":
        return lift(e.attr)
    parts = [_affine(a) for a in e.args]
    if e.type != "int" or len(parts) != 2 or parts[0] is None or parts[1] is None:
        return None
    left, right = parts[0], parts[1]
    if e.op in ("add", "sub"):
        return left + right if e.op == "add" else left - right
    if e.op == "mul" and (not left.terms or not right.terms):
        return right * left.const if not left.terms else left * right.const
    if e.op in ("remainder", "fmod") and not right.terms and right.const > 0:
        return left % right.const if e.op == "remainder" or left.bounds[0] >= 0 else None
    return None


@rule("gather")
def _gather(node: Node, x: Value, dim: int, index: Value, **_: Any) -> Map:
    axis = normal_dim(dim, len(x.shape))

    def body(b: Builder, at: tuple[Index, ...]) -> Expr:
        place = list(at)
        place[axis] = as_index(b.load(index, at), x.shape[axis], wrap=False)
        return b.load(x, place)

    return Map(node.name, tuple(node.shape), node.dtype, body, (x, index), node.op)


@rule("index_select")
def _index_select(node: Node, x: Value, dim: int, index: Value) -> Map:
    axis = normal_dim(dim, len(x.shape))

    def body(b: Builder, at: tuple[Index, ...]) -> Expr:
        place = list(at)
        where = [at[axis]] if index.shape else []
        place[axis] = as_index(b.load(index, where), x.shape[axis], wrap=False)
        return b.load(x, place)

    return Map(node.name, tuple(node.shape), node.dtype, body, (x, index), node.op)


@rule("embedding")
def _embedding(node: Node, weight: Value, index: Value, *_: Any) -> Map:
    def body(b: Builder, at: tuple[Index, ...]) -> Expr:
        return b.load(weight, [as_index(b.load(index, at[:-1]), weight.shape[0], False), at[-1]])

    return Map(node.name, tuple(node.shape), node.dtype, body, (weight, index), node.op)


@rule("index.Tensor", "_unsafe_index.Tensor")
def _index(node: Node, x: Value, indices: list[Value | None]) -> Map:
    """Advanced indexing. Index tensors broadcast together; their dims stand where the first of
    them stood when they are adjacent, and in front otherwise."""
    used = [d for d, i in enumerate(indices) if i is not None]
    present = [i for i in indices if i is not None]
    if any(i.dtype in ("bool", "uint8") for i in present):
        raise node.unsupported("with a mask: the result's size depends on data")
    rank = max(len(i.shape) for i in present)
    adjacent = used == list(range(used[0], used[-1] + 1))
    start = used[0] if adjacent else 0

    def body(b: Builder, at: tuple[Index, ...]) -> Expr:
        joint = at[start : start + rank]
        rest = iter([*at[:start], *at[start + rank :]])
        place: list[Index] = []
        for d, size in enumerate(x.shape):
            chosen = indices[d] if d < len(indices) else None
            if chosen is None:
                place.append(next(rest))
            else:
                value = cast(b.load(chosen, operand_index(joint, chosen.shape)), "int")
                place.append(as_index(value, size, wrap=True))
        return b.load(x, place)

    return Map(node.name, tuple(node.shape), node.dtype, body, (x, *present), node.op)


def _plus_sum(
    node: Node, x: Value, domain: tuple[int, ...], body: Body, operands: tuple[Value, ...]
) -> Map:
    """x plus the sum of `body` over the last dim of `domain`."""
    total = Reduce(
        f"{node.name}_sum",
        x.shape,
        node.dtype,
        "sum",
        domain,
        (len(domain) - 1,),
        body,
        operands,
        node.op,
        True,
    )

    def add(b: Builder, at: tuple[Index, ...]) -> Expr:
        return op("add", b.load(x, at), b.load(total, at))

    return Map(node.name, tuple(node.shape), node.dtype, add, (x, total), node.op)


@dataclass(frozen=True)
class Hits:
    """Which elements of `index` point at an element of the target: one more dim, over `axis`."""

    axis: int
    index: Value
    domain: tuple[int, ...]

    def place(self, at: tuple[Index, ...]) -> list[Index]:
        """Where in `index` an element of the domain stands."""
        return [*at[: self.axis], at[-1], *at[self.axis + 1 : -1]]

    def test(self, b: Builder, at: tuple[Index, ...]) -> Expr:
        target = expr("index", (), "int", at[self.axis])
        return expr("eq", (b.load(self.index, self.place(at)), target), "bool")


def _hits(node: Node, x: Value, dim: int, index: Value) -> Hits:
    axis = normal_dim(dim, len(x.shape))
    if index.shape[:axis] + index.shape[axis + 1 :] != x.shape[:axis] + x.shape[axis + 1 :]:
        raise node.unsupported("with an index smaller than its target in another dim")
    return Hits(axis, index, (*x.shape, index.shape[axis]))


@rule("scatter_add")
def _scatter_add(node: Node, x: Value, dim: int, index: Value, source: Value) -> Map:
    """Every output element sums the source elements that point at it: no atomics, a repeatable
    order."""
    hits = _hits(node, x, dim, index)

    def body(b: Builder, at: tuple[Index, ...]) -> Expr:
        hit = hits.test(b, at)
        value = cast(b.load(source, hits.place(at)), node.type)
        return expr("where", (hit, value, const(0, node.type)), node.type)

    return _plus_sum(node, x, hits.domain, body, (index, source))


@rule("scatter.value")
def _scatter_value(node: Node, x: Value, dim: int, index: Value, value: float) -> Map:
    hits = _hits(node, x, dim, index)
    hit = Reduce(
        f"{node.name}_hit",
        x.shape,
        "bool",
        "any",
        hits.domain,
        (len(hits.domain) - 1,),
        hits.test,
        (index,),
        node.op,
        True,
    )

    def choose(b: Builder, at: tuple[Index, ...]) -> Expr:
        return expr("where", (b.load(hit, at), const(value, node.type), b.load(x, at)), node.type)

    return Map(node.name, tuple(node.shape), node.dtype, choose, (x, hit), node.op)


@rule("index_put", "index_put_")
def _index_put(
    node: Node, x: Value, indices: list[Any], source: Value, accumulate: bool = False
) -> Map:
    """x[..., index, ...] (+)= source for one one-dimensional index tensor."""
    used = [d for d, i in enumerate(indices) if i is not None]
    if len(used) != 1 or len(indices[used[0]].shape) != 1 or not accumulate:
        raise node.unsupported("other than adding along one dim")
    axis, index = used[0], indices[used[0]]
    domain = (*x.shape, index.shape[0])

    def body(b: Builder, at: tuple[Index, ...]) -> Expr:
        hit = expr("eq", (b.load(index, [at[-1]]), expr("index", (), "int", at[axis])), "bool")
        place = [*at[:axis], at[-1], *at[axis + 1 : -1]]
        value = cast(b.load(source, operand_index(place, source.shape)), node.type)
        return expr("where", (hit, value, const(0, node.type)), node.type)

    return _plus_sum(node, x, domain, body, (index, source))
