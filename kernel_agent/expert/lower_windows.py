"""Rules for matmul, convolution and pooling: sums and maxima over a domain with index
arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kernel_agent.expert.index import Bound, Index, bound
from kernel_agent.expert.ir import Builder, Expr, Map, Reduce, Value, cast, const, index_value
from kernel_agent.expert.lower_pointwise import op
from kernel_agent.expert.lower_reduce import shaped
from kernel_agent.expert.lowering import Node, numel, operand_index, pointwise, rule


@rule("mm", "bmm")
def _matmul(node: Node, x: Value, y: Value) -> Value:
    """[batch] m n k, reduced over k."""
    domain = (*node.shape, x.shape[-1])
    batch = len(node.shape) - 2

    def body(b: Builder, index: tuple[Index, ...]) -> Expr:
        *lead, m, n, k = index
        left = cast(b.load(x, [*lead, m, k]), node.type)
        return op("mul", left, cast(b.load(y, [*lead, k, n]), node.type))

    return Reduce(
        node.name,
        tuple(node.shape),
        node.dtype,
        "sum",
        domain,
        (batch + 2,),
        body,
        (x, y),
        node.op,
        reuse=True,
    )


@rule("mv", "dot")
def _matvec(node: Node, x: Value, y: Value) -> Value:
    def body(b: Builder, index: tuple[Index, ...]) -> Expr:
        return op("mul", b.load(x, index), b.load(y, index[-1:]))

    rank = len(x.shape)
    return Reduce(
        node.name, x.shape[:-1], node.dtype, "sum", x.shape, (rank - 1,), body, (x, y), node.op
    )


@rule("convolution")
def _convolution(
    node: Node,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> Value:
    rank = len(x.shape) - 2
    steps = [(s * rank)[:rank] if len(s) == 1 else s for s in (stride, padding, dilation)]
    build = _conv_transposed if transposed else _conv_forward
    total = build(node, x, weight, groups, *steps)
    if bias is None:
        return shaped(node, total)

    def add_bias(b: Builder, index: tuple[Index, ...]) -> Expr:
        return op("add", b.load(joined, index), cast(b.load(bias, [index[1]]), node.type))

    joined = shaped(node, total)
    return Map(
        f"{node.name}_bias", tuple(node.shape), node.dtype, add_bias, (joined, bias), node.op
    )


def _conv_forward(
    node: Node,
    x: Value,
    weight: Value,
    groups: int,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> Reduce:
    """Domain: n, group, channel in group, output position..., input channel in group, tap..."""
    rank = len(stride)
    out_per = weight.shape[0] // groups
    in_per = weight.shape[1]
    taps = weight.shape[2:]
    domain = (node.shape[0], groups, out_per, *node.shape[2:], in_per, *taps)

    def body(b: Builder, index: tuple[Index, ...]) -> Expr:
        n, g, f = index[:3]
        where, c, tap = index[3 : 3 + rank], index[3 + rank], index[4 + rank :]
        place = [
            w * s + t * d - p
            for w, s, t, d, p in zip(where, stride, tap, dilation, padding, strict=True)
        ]
        inside = _inside(place, x.shape[2:])
        filter_at = cast(b.load(weight, [g * out_per + f, c, *tap]), node.type)
        value = b.where(inside, lambda: b.load(x, [n, g * in_per + c, *place]), const(0, x.type))
        return op("mul", cast(value, node.type), filter_at)

    dims = tuple(range(3 + rank, 4 + 2 * rank))
    return _conv_reduce(node, domain, dims, body, (x, weight))


def _conv_transposed(
    node: Node,
    x: Value,
    weight: Value,
    groups: int,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> Reduce:
    """The same domain; an output position takes the taps whose input position is a whole number of
    strides away."""
    rank = len(stride)
    in_per = weight.shape[0] // groups
    out_per = weight.shape[1]
    taps = weight.shape[2:]
    domain = (node.shape[0], groups, out_per, *node.shape[2:], in_per, *taps)

    def body(b: Builder, index: tuple[Index, ...]) -> Expr:
        n, g, f = index[:3]
        where, c, tap = index[3 : 3 + rank], index[3 + rank], index[4 + rank :]
        spread = [w + p - t * d for w, t, d, p in zip(where, tap, dilation, padding, strict=True)]
        place = [i // s for i, s in zip(spread, stride, strict=True)]
        sizes = [size * s for size, s in zip(x.shape[2:], stride, strict=True)]
        inside = _inside(spread, sizes)
        inside += [part for i, s in zip(spread, stride, strict=True) for part in bound(i % s, 0, 1)]
        filter_at = cast(b.load(weight, [g * in_per + c, f, *tap]), node.type)
        value = b.where(inside, lambda: b.load(x, [n, g * in_per + c, *place]), const(0, x.type))
        return op("mul", cast(value, node.type), filter_at)

    dims = tuple(range(3 + rank, 4 + 2 * rank))
    return _conv_reduce(node, domain, dims, body, (x, weight))


def _conv_reduce(
    node: Node, domain: Sequence[int], dims: Sequence[int], body: Any, operands: Any
) -> Reduce:
    kept = tuple(size for d, size in enumerate(domain) if d not in dims)
    return Reduce(
        node.name,
        kept,
        node.dtype,
        "sum",
        tuple(domain),
        tuple(dims),
        body,
        operands,
        node.op,
        reuse=True,
    )


def _inside(place: Sequence[Index], sizes: Sequence[int]) -> list[Bound]:
    return [part for i, size in zip(place, sizes, strict=True) for part in bound(i, 0, size)]


@rule("max_pool2d_with_indices", "max_pool3d_with_indices", "max_pool1d", "max_pool2d")
def _max_pool(
    node: Node,
    x: Value,
    kernel: list[int],
    stride: list[int] | None = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> Any:
    shape, dtype = (
        (node.shape[0], node.dtype[0]) if isinstance(node.dtype, list) else (node.shape, node.dtype)
    )
    rank = node_rank(node.op)
    size = _each(kernel, rank)
    steps = (_each(stride or kernel, rank), _each(padding, rank), _each(dilation, rank))
    part = Node(node.name, node.op, shape, dtype)
    pooled = _window(part, x, "max", size, *steps, outside=-math.inf)
    return [pooled, None] if isinstance(node.dtype, list) else pooled


def node_rank(name: str) -> int:
    return int(name.split("pool")[1][0])


def _each(value: Any, rank: int) -> list[int]:
    if isinstance(value, int):
        return [value] * rank
    return list(value) * rank if len(value) == 1 else list(value)


def _window(
    node: Node,
    x: Value,
    kind: str,
    size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    outside: float,
) -> Reduce:
    rank = len(size)
    lead = len(x.shape) - rank
    domain = (*node.shape, *size)

    def body(b: Builder, index: tuple[Index, ...]) -> Expr:
        where, tap = index[lead : lead + rank], index[lead + rank :]
        place = [
            w * s + t * d - p
            for w, s, t, d, p in zip(where, stride, tap, dilation, padding, strict=True)
        ]
        inside = _inside(place, x.shape[lead:])
        return b.where(inside, lambda: b.load(x, [*index[:lead], *place]), const(outside, x.type))

    dims = tuple(range(lead + rank, lead + 2 * rank))
    overlap = any(s < k for s, k in zip(stride, size, strict=True))
    return Reduce(
        node.name,
        tuple(node.shape),
        node.dtype,
        kind,
        domain,
        dims,
        body,
        (x,),
        node.op,
        reuse=overlap,
    )


@rule("avg_pool2d", "avg_pool3d", "avg_pool1d")
def _avg_pool(
    node: Node,
    x: Value,
    kernel: list[int],
    stride: list[int] | None = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Value:
    rank = node_rank(node.op)
    size, pads = _each(kernel, rank), _each(padding, rank)
    steps = _each(stride or kernel, rank)
    part = Node(f"{node.name}_sum", node.op, node.shape, _sum_dtype(node))
    total = _window(part, x, "sum", size, steps, pads, [1] * rank, outside=0.0)
    lead = len(x.shape) - rank

    def count(index: Index, d: int) -> Expr | int:
        """How many elements of dim d the window counts: a constant unless it can leave the counted
        range."""
        pad, length = pads[d], x.shape[lead + d]
        first = index * steps[d] - pad
        low, high = (-pad, length + pad) if count_include_pad else (0, length)
        least, greatest = first.bounds
        if least >= low and greatest + size[d] <= high:
            return size[d]
        start = op("max", index_value(first), const(low, "int"))
        stop = op("min", index_value(first + size[d]), const(high, "int"))
        return op("sub", stop, start)

    def divide(b: Builder, index: tuple[Index, ...]) -> Expr:
        e = b.load(total, index)
        if divisor_override:
            return op("mul", e, const(1.0 / divisor_override, e.type))
        counts = [count(index[lead + d], d) for d in range(rank)]
        fixed = math.prod(c for c in counts if isinstance(c, int))
        moving = [cast(c, e.type) for c in counts if not isinstance(c, int)]
        if not moving:
            return op("mul", e, const(1.0 / fixed, e.type))
        divisor = const(fixed, e.type)
        for c in moving:
            divisor = op("mul", divisor, c)
        return op("div", e, divisor)

    return Map(node.name, tuple(node.shape), node.dtype, divide, (total,), node.op)


def _sum_dtype(node: Node) -> str:
    """Sums that a division follows are kept in fp32 until then."""
    return "float32" if node.dtype in ("bfloat16", "float16") else str(node.dtype)


@dataclass(frozen=True)
class Split:
    """A length in windows: number i of n over a length L is [floor(i*L/n), ceil((i+1)*L/n))."""

    length: int
    parts: int

    def start(self, i: Index) -> Index:
        return (i * self.length) // self.parts

    def stop(self, i: Index) -> Index:
        return (i * self.length + (self.length + self.parts - 1)) // self.parts

    @property
    def even(self) -> bool:
        return self.length % self.parts == 0

    @property
    def widest(self) -> int:
        n, m = self.length, self.parts
        return max(-(-(i + 1) * n // m) - i * n // m for i in range(m))


def _splits(node: Node, x: Value) -> list[Split]:
    rank = node_rank(node.op)
    return [Split(n, m) for n, m in zip(x.shape[-rank:], node.shape[-rank:], strict=True)]


@rule("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_avg_pool1d")
def _adaptive_avg_pool(node: Node, x: Value, out: list[int]) -> Value:
    part = Node(f"{node.name}_sum", node.op, node.shape, _sum_dtype(node))
    total = _adaptive(part, x, "sum", outside=0.0)
    splits = _splits(node, x)

    def divide(b: Builder, index: tuple[Index, ...]) -> Expr:
        e = b.load(total, index)
        if all(s.even for s in splits):
            return op("mul", e, const(1.0 / numel([s.widest for s in splits]), e.type))
        divisor = const(1, e.type)
        for s, i in zip(splits, index[-len(splits) :], strict=True):
            divisor = op("mul", divisor, cast(index_value(s.stop(i) - s.start(i)), e.type))
        return op("div", e, divisor)

    return Map(node.name, tuple(node.shape), node.dtype, divide, (total,), node.op)


@rule("adaptive_max_pool2d", "adaptive_max_pool3d", "adaptive_max_pool1d")
def _adaptive_max_pool(node: Node, x: Value, out: list[int]) -> list[Any]:
    part = Node(node.name, node.op, node.shape[0], node.dtype[0])
    return [_adaptive(part, x, "max", outside=-math.inf), None]


def _adaptive(node: Node, x: Value, kind: str, outside: float) -> Reduce:
    """Domain: output position..., tap in the widest window; shorter ones mask their last taps."""
    splits = _splits(node, x)
    rank = len(splits)
    lead = len(x.shape) - rank

    def body(b: Builder, index: tuple[Index, ...]) -> Expr:
        where, tap = index[lead : lead + rank], index[lead + rank :]
        place = [s.start(w) + t for s, w, t in zip(splits, where, tap, strict=True)]
        inside: list[Bound] = []
        if not all(s.even for s in splits):
            for s, w, at in zip(splits, where, place, strict=True):
                inside += bound(s.stop(w) - at - 1, 0, s.length)
        inside += _inside(place, x.shape[lead:])
        return b.where(inside, lambda: b.load(x, [*index[:lead], *place]), const(outside, x.type))

    shape, dims = tuple(node.shape), tuple(range(lead + rank, lead + 2 * rank))
    domain = (*shape, *(s.widest for s in splits))
    return Reduce(node.name, shape, node.dtype, kind, domain, dims, body, (x,), node.op)


@rule("_cdist_forward")
def _cdist(node: Node, x: Value, y: Value, p: float, *_: Any) -> Value:
    if p not in (1.0, 2.0):
        raise node.unsupported(f"with p = {p}")
    domain = (*node.shape, x.shape[-1])
    rank = len(domain)

    def body(b: Builder, index: tuple[Index, ...]) -> Expr:
        *lead, m, n, k = index
        left = b.load(x, [*operand_index(lead, x.shape[:-2]), m, k])
        gap = op("sub", left, b.load(y, [*operand_index(lead, y.shape[:-2]), n, k]))
        return op("mul", gap, gap) if p == 2.0 else op("abs", gap)

    total = Reduce(
        f"{node.name}_sum",
        tuple(node.shape),
        node.dtype,
        "sum",
        domain,
        (rank - 1,),
        body,
        (x, y),
        node.op,
        reuse=True,
    )
    return pointwise(node, lambda a: op("sqrt", a) if p == 2.0 else a, total)
