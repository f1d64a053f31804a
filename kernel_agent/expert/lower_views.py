"""Rules for operators that move elements: shapes, slices, joins, padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kernel_agent.expert.index import Index, bound, delinearize, lift, linearize
from kernel_agent.expert.ir import Builder, Expr, Map, Value, cast, const
from kernel_agent.expert.lowering import Node, normal_dim, numel, operand_index, rule, tensors, view


@rule(
    "view",
    "reshape",
    "_unsafe_view",
    "_reshape_copy",
    "squeeze.dims",
    "squeeze.dim",
    "squeeze",
    "unsqueeze",
    "flatten.using_ints",
)
def _view(node: Node, x: Value, *_: Any) -> Map:
    return reshape(node, x)


def reshape(node: Node, x: Value) -> Map:
    """The same elements in the same order under the node's shape."""
    kept = [d for d, size in enumerate(x.shape) if size != 1]
    if [x.shape[d] for d in kept] == [size for size in node.shape if size != 1]:

        def place(index: tuple[Index, ...]) -> list[Index | int]:  # only ones were added or removed
            moving = iter(i for i, size in zip(index, node.shape, strict=True) if size != 1)
            return [next(moving) if d in kept else 0 for d in range(len(x.shape))]

        return view(node, x, place)
    return view(node, x, lambda index: delinearize(linearize(index, node.shape), x.shape))


@rule("as_strided", "as_strided_copy")
def _as_strided(
    node: Node, x: Value, size: list[int], stride: list[int], offset: int | None = None
) -> Map:
    """Positions in x's elements taken in order; right when x is laid out in that order, as fresh
    results are."""

    def place(index: tuple[Index, ...]) -> Sequence[Index]:
        flat = lift(offset or 0)
        for i, step in zip(index, stride, strict=True):
            flat = flat + i * step
        return delinearize(flat, x.shape)

    contiguous = [numel(size[d + 1 :]) for d in range(len(size))]
    if list(stride) == contiguous and not offset and numel(size) == numel(x.shape):
        return reshape(node, x)
    return view(node, x, place)


@rule(
    "clone",
    "alias",
    "contiguous",
    "detach",
    "lift_fresh_copy",
    "lift_fresh",
    "dropout",
    "expand_copy",
)
def _same(node: Node, x: Value, *_: Any, **__: Any) -> Map:
    return view(node, x, lambda index: index)


@rule("permute", "prims::transpose")
def _permute(node: Node, x: Value, dims: list[int]) -> Map:
    rank = len(x.shape)
    order = [normal_dim(d, rank) for d in dims]
    return view(node, x, lambda index: [index[order.index(d)] for d in range(rank)])


@rule("transpose.int")
def _transpose(node: Node, x: Value, a: int, b: int) -> Map:
    rank = len(x.shape)
    a, b = normal_dim(a, rank), normal_dim(b, rank)
    swap = {a: b, b: a}
    return view(node, x, lambda index: [index[swap.get(d, d)] for d in range(rank)])


@rule("t")
def _t(node: Node, x: Value) -> Map:
    return view(node, x, lambda index: index[::-1])


@rule("expand", "broadcast_to")
def _expand(node: Node, x: Value, *_: Any, **__: Any) -> Map:
    return view(node, x, lambda index: operand_index(index, x.shape))


@rule("prims::broadcast_in_dim")
def _broadcast_in_dim(node: Node, x: Value, shape: list[int], dims: list[int]) -> Map:
    def place(index: tuple[Index, ...]) -> list[Index | int]:
        return [0 if x.shape[d] == 1 else index[dims[d]] for d in range(len(dims))]

    return view(node, x, place)


@rule("slice.Tensor")
def _slice(
    node: Node, x: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Map:
    dim = normal_dim(dim, len(x.shape))
    first = _clip(start or 0, x.shape[dim])
    return view(node, x, lambda index: _replaced(index, dim, index[dim] * step + first))


def _clip(position: int, size: int) -> int:
    return max(0, min(position + size if position < 0 else position, size))


def _replaced(index: Sequence[Index], dim: int, new: Index) -> list[Index]:
    return [*index[:dim], new, *index[dim + 1 :]]


@rule("select.int")
def _select(node: Node, x: Value, dim: int, position: int) -> Map:
    dim = normal_dim(dim, len(x.shape))
    at = lift(position + x.shape[dim] if position < 0 else position)
    return view(node, x, lambda index: [*index[:dim], at, *index[dim:]])


@rule("flip")
def _flip(node: Node, x: Value, dims: list[int]) -> Map:
    turned = {normal_dim(d, len(x.shape)) for d in dims}

    def place(index: tuple[Index, ...]) -> list[Index]:
        return [lift(x.shape[d] - 1) - i if d in turned else i for d, i in enumerate(index)]

    return view(node, x, place)


@rule("repeat")
def _repeat(node: Node, x: Value, repeats: list[int]) -> Map:
    rank = len(x.shape)

    def place(index: tuple[Index, ...]) -> list[Index]:
        tail = index[len(index) - rank :]
        return [i % size for i, size in zip(tail, x.shape, strict=True)]

    return view(node, x, place)


@rule("unfold")
def _unfold(node: Node, x: Value, dim: int, size: int, step: int) -> Map:
    dim = normal_dim(dim, len(x.shape))
    return view(node, x, lambda index: _replaced(index[:-1], dim, index[dim] * step + index[-1]))


@rule("diagonal")
def _diagonal(node: Node, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Map:
    rank = len(x.shape)
    row, column = normal_dim(dim1, rank), normal_dim(dim2, rank)

    def place(index: tuple[Index, ...]) -> list[Index]:
        rest = iter(index[:-1])
        at = {row: index[-1] + max(-offset, 0), column: index[-1] + max(offset, 0)}
        return [at[d] if d in at else next(rest) for d in range(rank)]

    return view(node, x, place)


@rule(
    "split_with_sizes", "split.Tensor", "unbind.int", "split_with_sizes_copy", "unsafe_split.Tensor"
)
def _split(node: Node, x: Value, sizes: Any = 0, dim: int = 0) -> list[Map]:
    pieces, start = [], 0
    axis = normal_dim(sizes if node.op == "unbind.int" else dim, len(x.shape))
    for k, shape in enumerate(node.shape):
        part = Node(f"{node.name}_{k}", node.op, shape, node.dtype[k])
        if node.op == "unbind.int":
            pieces.append(_select(part, x, axis, k))
        else:
            pieces.append(_slice(part, x, axis, start))
            start += shape[axis]
    return pieces


@rule("cat")
def _cat(node: Node, parts: list[Value], dim: int = 0) -> Map:
    parts = [part for part in parts if numel(part.shape)]
    axis = normal_dim(dim, len(node.shape))

    def body(b: Builder, index: tuple[Index, ...]) -> Expr:
        def from_part(k: int, start: int) -> Expr:
            part, size = parts[k], parts[k].shape[axis]
            place = _replaced(index, axis, index[axis] - start)

            def inside() -> Expr:
                return cast(b.load(part, place), node.type)

            if k == len(parts) - 1:
                with b.within(bound(place[axis], 0, size)):
                    return inside()
            outside = from_part(k + 1, start + size)
            return b.where(bound(place[axis], 0, size), inside, outside)

        return from_part(0, 0)

    return Map(node.name, node.shape, node.dtype, body, tuple(parts), node.op)


@rule("constant_pad_nd")
def _pad(node: Node, x: Value, pad: list[int], value: float = 0.0) -> Map:
    return padded(node, x, pad, value)


def padded(node: Node, x: Value, pad: list[int], value: float) -> Map:
    """`pad` lists (before, after) from the last dim backwards, as torch has it; negative pads
    crop."""
    before = [0] * len(x.shape)
    for k in range(len(pad) // 2):
        before[-1 - k] = pad[2 * k]

    def body(b: Builder, index: tuple[Index, ...]) -> Expr:
        place = [i - p for i, p in zip(index, before, strict=True)]
        sizes = zip(place, x.shape, strict=True)
        bounds = [part for i, size in sizes for part in bound(i, 0, size)]
        return b.where(bounds, lambda: b.load(x, place), const(value, x.type))

    return Map(node.name, node.shape, node.dtype, body, (x,), node.op)


@rule("copy")
def _copy(node: Node, into: Value, x: Value, *_: Any) -> Map:
    def body(b: Builder, index: tuple[Index, ...]) -> Expr:
        return cast(b.load(x, operand_index(index, x.shape)), node.type)

    return Map(node.name, node.shape, node.dtype, body, tensors(x), node.op)


@rule("slice_scatter")
def _slice_scatter(
    node: Node,
    x: Value,
    source: Value,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: int = 1,
) -> Map:
    dim = normal_dim(dim, len(x.shape))
    first = _clip(start or 0, x.shape[dim])

    def body(b: Builder, index: tuple[Index, ...]) -> Expr:
        offset = index[dim] - first
        bounds = [*bound(offset, 0, source.shape[dim] * step)]
        if step > 1:
            bounds += bound(offset % step, 0, 1)
        place = _replaced(index, dim, offset // step)
        return b.where(bounds, lambda: b.load(source, place), b.load(x, index))

    return Map(node.name, node.shape, node.dtype, body, (x, source), node.op)


@rule("select_scatter")
def _select_scatter(node: Node, x: Value, source: Value, dim: int, position: int) -> Map:
    dim = normal_dim(dim, len(x.shape))
    at = position + x.shape[dim] if position < 0 else position

    def body(b: Builder, index: tuple[Index, ...]) -> Expr:
        place = [*index[:dim], *index[dim + 1 :]]
        bounds = bound(index[dim], at, at + 1)
        return b.where(bounds, lambda: b.load(source, place), b.load(x, index))

    return Map(node.name, node.shape, node.dtype, body, (x, source), node.op)
