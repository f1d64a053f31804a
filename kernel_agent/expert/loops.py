"""Make the loops of a kernel plain: split them where addresses divide, merge those walked as
one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kernel_agent.expert.index import Div, Index, Indirect, Mod, Var, lift, var
from kernel_agent.expert.ir import Expr, expr, rewrite, walk
from kernel_agent.expert.kernels import LoopKernel, Pass, Store, stores, with_stores

MIN_INNER = 16  # a shorter inner loop is not worth splitting off


def split_loops(kernel: LoopKernel) -> LoopKernel:
    """Split a loop where addresses divide it (v // c, v % c with c a divisor): both parts are then
    plain loops."""
    fresh = 0
    while True:
        found = _border(kernel)
        if found is None:
            return kernel
        v, c = found
        high, low = Var(f"{v.name}h{fresh}", v.size // c), Var(f"{v.name}l{fresh}", c)
        fresh += 1
        rows = v in kernel.row
        loop = kernel.row if rows else kernel.outer
        at = loop.index(v)
        new = (*loop[:at], high, low, *loop[at + 1 :])
        change = {v: var(high.name, high.size) * c + var(low.name, low.size)}
        kernel = _replace_loops(kernel, change, new, rows)


def _border(kernel: LoopKernel) -> tuple[Var, int] | None:
    """A loop and the size of its inner part. Inner parts too short for a vector are left as they
    are."""
    for index in _indices(kernel):
        for atom, _ in index.terms:
            if not isinstance(atom, Div | Mod):
                continue
            for v, c in atom.num.terms:
                inner = atom.den // c if c > 0 and atom.den % c == 0 else 0
                if (
                    isinstance(v, Var)
                    and inner >= MIN_INNER
                    and v.size % inner == 0
                    and v.size > inner
                ):
                    return v, inner
    return None


def collapse(kernel: LoopKernel) -> LoopKernel:
    """Merge neighbouring loops that every address walks as one, then give the loops their final
    names."""
    for rows in (False, True):
        position = 0
        while True:
            loop = kernel.row if rows else kernel.outer
            if position + 1 >= len(loop):
                break
            left, right = loop[position], loop[position + 1]
            if all(_one_walk(i, left, right) for i in _indices(kernel)):
                merged = Var(left.name, left.size * right.size)
                new = (*loop[:position], merged, *loop[position + 2 :])
                kernel = _replace_loops(
                    kernel, {left: lift(0), right: var(merged.name, merged.size)}, new, rows
                )
            else:
                position += 1
    return _rename(kernel)


def _indices(kernel: LoopKernel) -> Iterator[Index]:
    for s in stores(kernel):
        yield s.index
    for e in walk(with_stores(kernel)):
        if e.op == "index":
            yield e.attr
        elif e.op == "load":
            yield e.attr[1]
            yield from (b.index for b in e.attr[2])


def _one_walk(index: Index, left: Var, right: Var) -> bool:
    """left*k*size(right) + right*k everywhere in the index: the two loops are one longer loop."""
    if index.coefficient(left) != index.coefficient(right) * right.size:
        return False
    for atom, _ in index.terms:
        if isinstance(atom, Div | Mod) and not _one_walk(atom.num, left, right):
            return False
        if isinstance(atom, Indirect) and {left, right} & atom.value.variables:
            inner = [
                e.attr if e.op == "index" else e.attr[1]
                for e in walk([atom.value])
                if e.op in ("index", "load")
            ]
            if not all(_one_walk(i, left, right) for i in inner):
                return False
    return True


def _replace_loops(
    kernel: LoopKernel, change: dict[Var, Index], new: tuple[Var, ...], rows: bool
) -> LoopKernel:
    memo: dict[Expr, Expr] = {}

    def sub(e: Expr) -> Expr:
        return rewrite(e, change, memo)

    def store(s: Store) -> Store:
        place = sub(expr("index", (), "int", s.index))
        return Store(
            s.buffer, place.attr if place.op == "index" else lift(place.attr), sub(s.value)
        )

    passes = [
        Pass(
            [replace(a, value=sub(a.value)) for a in p.accumulate],
            [store(s) for s in p.stores],
            [store(s) for s in p.after],
        )
        for p in kernel.passes
    ]
    if rows:
        return replace(kernel, passes=passes, row=new)
    return replace(kernel, passes=passes, outer=new)


def _rename(kernel: LoopKernel) -> LoopKernel:
    """Loops are called i, j, k ... from outside in; row loops r, s, t ..."""
    for rows, letters in ((False, "ijklmnop"), (True, "rstuvwq")):
        loop = kernel.row if rows else kernel.outer
        names = [letters[k] if k < len(letters) else f"{letters[-1]}{k}" for k in range(len(loop))]
        new = tuple(Var(name, v.size) for name, v in zip(names, loop, strict=True))
        # Two steps, for a new name may be an old one of another loop.
        change = {v: var(w.name, w.size) for v, w in zip(loop, new, strict=True)}
        kernel = _replace_loops(kernel, change, new, rows)
    return kernel
