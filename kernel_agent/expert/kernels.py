"""What one kernel does, before it is printed: loops over variables, expressions, stores.

    Store       buffer[index] = value
    Accumulate  a local (one per outer step) that combines a value over the row
    Pass        one walk over the row, with what is stored after it
    LoopKernel  outer loops (parallel), row loops (inside), passes; a pointwise kernel has no row
    ScanKernel  outer loops, one ordered loop, a running local

No target in here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kernel_agent.expert.index import Index, Var
from kernel_agent.expert.ir import Expr, expr, walk


@dataclass(frozen=True)
class Store:
    buffer: str
    index: Index
    value: Expr


@dataclass(frozen=True)
class Accumulate:
    name: str
    kind: str
    value: Expr
    type: str  # of the result: int for argmax


@dataclass
class Pass:
    """One walk over the row, then `after` once per outer step."""

    accumulate: list[Accumulate] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    after: list[Store] = field(default_factory=list)

    @property
    def walks(self) -> bool:
        return bool(self.accumulate or self.stores)


@dataclass
class LoopKernel:
    name: str
    outer: tuple[Var, ...]
    row: tuple[Var, ...]
    passes: list[Pass]
    comment: list[str]
    layout: (
        str  # pointwise | row (the row's last loop is contiguous) | column (the last outer loop is)
    )


@dataclass
class ScanKernel:
    name: str
    outer: tuple[Var, ...]
    dim: Var
    kind: str
    value: Expr
    stores: list[Store]  # use the local `running`
    comment: list[str]
    contiguous: bool  # along the scan


Kernel = LoopKernel | ScanKernel


def roots(kernel: Kernel) -> list[Expr]:
    """Every expression of a kernel."""
    if isinstance(kernel, ScanKernel):
        return [kernel.value, *(s.value for s in kernel.stores)]
    found = []
    for p in kernel.passes:
        found += [a.value for a in p.accumulate] + [s.value for s in (*p.stores, *p.after)]
    return found


def stores(kernel: Kernel) -> list[Store]:
    if isinstance(kernel, ScanKernel):
        return kernel.stores
    return [s for p in kernel.passes for s in (*p.stores, *p.after)]


def loads(kernel: Kernel) -> list[Expr]:
    return [e for e in walk(with_stores(kernel)) if e.op == "load"]


def with_stores(kernel: Kernel) -> list[Expr]:
    return [*roots(kernel), *(expr("index", (), "int", s.index) for s in stores(kernel))]


def reads(kernel: Kernel) -> list[str]:
    return list(dict.fromkeys(e.attr[0] for e in loads(kernel)))


def writes(kernel: Kernel) -> list[str]:
    return list(dict.fromkeys(s.buffer for s in stores(kernel)))


def shared_values(kernel: LoopKernel) -> list[list[Expr]]:
    """For each pass, the largest values along the row that it computes and a later pass needs
    again."""
    row = set(kernel.row)
    inside = [set(walk(walked(p))) for p in kernel.passes]
    before: set[Expr] = set()
    out: list[list[Expr]] = []
    for position, p in enumerate(kernel.passes):
        found: list[Expr] = []
        for later in kernel.passes[position + 1 :]:
            _maximal(walked(later), inside[position], row, found)
        fresh = [e for e in found if e not in before]
        out.append(fresh if p.walks else [])
        before |= set(found)
    return out


def walked(p: Pass) -> list[Expr]:
    """What a pass computes along the row."""
    return [a.value for a in p.accumulate] + [s.value for s in p.stores]


def _maximal(roots: list[Expr], inside: set[Expr], row: set[Var], found: list[Expr]) -> None:
    for e in roots:
        if not e.variables & row:
            continue
        if e in inside and e.op not in ("index", "inside", "const"):
            if e not in found:
                found.append(e)
        else:
            _maximal(list(e.args), inside, row, found)
