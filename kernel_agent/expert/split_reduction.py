"""A long reduction with few results, in two halves that both have enough to do in parallel."""

from __future__ import annotations

from dataclasses import replace

from kernel_agent.expert.index import Index
from kernel_agent.expert.ir import Builder, Expr, Reduce
from kernel_agent.expert.lowering import numel

FEW_ROWS = 64  # fewer results than this do not keep a device busy
LONG = 2**18  # elements from which a reduction with few results is split
PARTS = 1024  # results the first half of a split reduction aims at


def split(value: Reduce) -> Reduce | None:
    """The second half of a reduction whose first half (its only operand) leaves more results; None
    when the reduction has enough parallel work already, or cannot be divided evenly."""
    results, length = numel(value.shape), numel(value.domain) // max(numel(value.shape), 1)
    if (
        value.reuse
        or results >= FEW_ROWS
        or results * length < LONG
        or value.kind.startswith("arg")
    ):
        return None
    goal = min(PARTS // max(results, 1), length // 256)
    moved: list[int] = []  # reduced dims that become loops of the first half
    part = 1
    dims = [d for d in value.dims if value.domain[d] > 1]
    while dims and part * value.domain[dims[0]] <= goal:
        part *= value.domain[dims[0]]
        moved.append(dims.pop(0))
    if not dims:
        return None
    size = value.domain[dims[0]]
    cut = max(
        (q for q in range(1, min(size, max(goal // part, 1)) + 1) if size % q == 0), default=1
    )
    if part * cut < 8:
        return None
    return _halves(value, moved, dims[0], cut)


def _halves(value: Reduce, moved: list[int], axis: int, cut: int) -> Reduce:
    inner = value.domain[axis] // cut
    domain = (*value.domain[:axis], cut, inner, *value.domain[axis + 1 :])
    shift = [d if d < axis else d + 1 for d in value.dims if d not in moved and d != axis]
    dims = tuple(sorted([*shift, axis + 1]))

    def body(b: Builder, index: tuple[Index, ...]) -> Expr:
        joined = index[axis] * inner + index[axis + 1]
        return value.body(b, (*index[:axis], joined, *index[axis + 2 :]))

    kept = [d for d in range(len(domain)) if d not in dims]
    shape = tuple(domain[d] for d in kept)
    dtype = "float32" if value.dtype == "bfloat16" else value.dtype
    first = Reduce(
        f"{value.name}_parts", shape, dtype, value.kind, domain, dims, body, value.inputs, value.op
    )
    again = tuple(k for k, d in enumerate(kept) if d == axis or d in moved)
    return replace(
        value,
        domain=shape,
        dims=again,
        body=lambda b, index: b.load(first, index),
        operands=(first,),
    )
