"""Recognise a matrix product in a reduction: sum over k of a(m, k) * b(n, k), however the
addresses look.

Matmul, linear and convolution are all this; they differ in how m, n and k become addresses. Rows
are the loops only the first factor has, columns those only the second has, batch those both have;
columns include the contiguous loop of the result.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernel_agent.expert.index import Var
from kernel_agent.expert.ir import Expr
from kernel_agent.expert.kernels import Accumulate, LoopKernel, Store

MIN_SIDE = 16  # a smaller side or depth does not fill a tile


@dataclass(frozen=True)
class Contraction:
    """`left` depends on batch, rows, depth; `right` on batch, columns, depth."""

    batch: tuple[Var, ...]
    rows: tuple[Var, ...]
    columns: tuple[Var, ...]
    depth: tuple[Var, ...]
    left: Expr
    right: Expr
    total: Accumulate
    stores: tuple[Store, ...]


def match(kernel: LoopKernel) -> Contraction | None:
    """The contraction a kernel computes, or None when it is none or too small to tile."""
    if len(kernel.passes) != 1 or kernel.passes[0].stores or len(kernel.passes[0].accumulate) != 1:
        return None
    total = kernel.passes[0].accumulate[0]
    product = total.value
    if total.kind != "sum" or total.type != "float" or product.op != "mul" or not kernel.outer:
        return None
    left, right = product.args
    if kernel.outer[-1] in left.variables:
        left, right = right, left
    batch = tuple(v for v in kernel.outer if (v in left.variables) == (v in right.variables))
    rows = tuple(v for v in kernel.outer if v in left.variables and v not in batch)
    columns = tuple(v for v in kernel.outer if v in right.variables and v not in batch)
    if not all(set(kernel.row) & part.variables for part in (left, right)):
        return None
    if min(_count(rows), _count(columns), _count(kernel.row)) < MIN_SIDE:
        return None
    return Contraction(
        batch, rows, columns, kernel.row, left, right, total, tuple(kernel.passes[0].after)
    )


def _count(loops: tuple[Var, ...]) -> int:
    size = 1
    for v in loops:
        size *= v.size
    return size
