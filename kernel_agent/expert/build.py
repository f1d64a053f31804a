"""Values that share a kernel, as its loops and passes. NotFusable is the proof that they cannot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kernel_agent.expert.index import Index, Var, lift, linearize, var
from kernel_agent.expert.ir import Builder, Expr, Map, NotFusable, Reduce, Scan, Value, expr, walk
from kernel_agent.expert.kernels import Accumulate, LoopKernel, Pass, ScanKernel, Store, loads
from kernel_agent.expert.loops import collapse, split_loops


def build_loops(
    name: str,
    members: Sequence[Value],
    kept: Callable[[Value], bool],
    stored: Callable[[Value], bool],
    alias: Mapping[Value, Value] | None = None,
) -> LoopKernel:
    """One kernel for `members` (operands first). `kept`: members that something outside needs.
    `alias`: values whose place another one takes. Raises NotFusable when they do not share one
    loop structure."""
    space = Space(members)
    passes = Passes(space, stored, alias or {})
    for value in members:
        passes.compute(value)
        if kept(value):
            passes.store(value)
    found = [p for p in passes.found if p.walks or p.after]
    kernel = LoopKernel(name, space.outer, space.row, found, [], "pointwise")
    kernel = collapse(split_loops(kernel))
    kernel.layout = _layout(kernel)
    return kernel


class Passes:
    """The passes of one kernel, as its members are computed one by one, operands first."""

    def __init__(
        self, space: Space, stored: Callable[[Value], bool], alias: Mapping[Value, Value]
    ) -> None:
        self.found: list[Pass] = [Pass()]
        self._space = space
        self._alias = alias
        self._builder = Builder(stored, self._local)
        self._held: dict[Value, Expr] = {}
        self._level: dict[str, int] = {}  # of a local: the first pass that may use it

    def compute(self, value: Value) -> None:
        if isinstance(value, Reduce):
            body = value.body(self._builder, self._space.domain_index[value])
            self._held[value] = expr("local", (), value.type, self._reduced(value, body))
        else:
            assert isinstance(value, Map)
            self._held[value] = value.body(self._builder, self._space.index[value])

    def store(self, value: Value) -> None:
        """Along the row as soon as its locals are known; otherwise at the end of the pass that
        completes them."""
        flat = linearize(self._space.index[value], value.shape)
        store = Store(value.name, flat, self._held[value])
        at = self._depth(store.value)
        if self._space.full[value]:
            self.found[at].stores.append(store)
        else:
            self.found[max(at - 1, 0)].after.append(store)

    def _local(self, value: Value, index: tuple[Index, ...]) -> Expr | None:
        value = self._alias.get(value, value)
        if value not in self._space.index:
            return None
        if value not in self._held or index != self._space.index[value]:
            raise NotFusable(f"{value.name} is needed at another place than where it is computed")
        return self._held[value]

    def _depth(self, e: Expr) -> int:
        """The first pass in which all locals that `e` needs are known."""
        return max((self._level[x.attr] for x in walk([e]) if x.op == "local"), default=0)

    def _reduced(self, value: Reduce, body: Expr) -> str:
        """The local that combines `body` over the row: one that does so already, or a new one."""
        at = self._depth(body)
        for a in self.found[at].accumulate:
            if (a.kind, a.value, a.type) == (value.kind, body, value.type):
                return a.name
        name = self._local_name(value.kind)
        self.found[at].accumulate.append(Accumulate(name, value.kind, body, value.type))
        self._level[name] = at + 1
        if at + 1 == len(self.found):
            self.found.append(Pass())
        return name

    def _local_name(self, kind: str) -> str:
        """row_sum, row_sum_2, ..."""
        count = 1 + sum(a.kind == kind for p in self.found for a in p.accumulate)
        return f"row_{kind}" + (f"_{count}" if count > 1 else "")


class Space:
    """The loops that the members of one kernel share, and each member's index in them.

    Shapes that differ by a reshape are made to agree by splitting loops where any of them has a
    border."""

    def __init__(self, members: Sequence[Value]) -> None:
        reduces = [v for v in members if isinstance(v, Reduce)]
        first = reduces[0] if reduces else None
        shape = first.domain if first else members[0].shape
        dims = first.dims if first else ()
        # Segments of the natural order: [size, is in the row]
        self._segments: list[tuple[int, bool]] = [
            (size, d in dims) for d, size in enumerate(shape) if size != 1
        ]
        self.full: dict[Value, bool] = {}
        for v in members:
            self.full[v] = (
                isinstance(v, Map) and bool(reduces) and _count(v.shape) != self._outer_count()
            )
        for _ in range(2):
            for v in members:
                self._refine(v.shape, not (self.full[v] or not reduces))
                if isinstance(v, Reduce):
                    self._refine(v.domain, False)
        variables = [(Var(f"s{k}", size), row) for k, (size, row) in enumerate(self._segments)]
        self.outer = tuple(v for v, row in variables if not row)
        self.row = tuple(v for v, row in variables if row)
        everything = [v for v, _ in variables]
        self.index = {
            v: _group(v.shape, everything if self.full[v] else list(self.outer)) for v in members
        }
        self.domain_index: dict[Value, tuple[Index, ...]] = {}
        for r in reduces:
            place = _group(r.domain, everything)
            in_row = {w for d in r.dims for w in place[d].variables}
            if in_row != set(self.row):
                raise NotFusable(f"{r.name} reduces other loops")
            self.domain_index[r] = place

    def _outer_count(self) -> int:
        return _count([size for size, row in self._segments if not row])

    def _refine(self, shape: Sequence[int], outer_only: bool) -> None:
        """Split segments so that every dim of `shape` is a whole number of them."""
        out: list[tuple[int, bool]] = []
        pending = [size for size in shape if size != 1]
        need = 1  # what the current dim still lacks
        for size, row in reversed(self._segments):
            if outer_only and row:
                out.append((size, row))
                continue
            while size > 1:
                if need == 1:
                    if not pending:
                        raise NotFusable("shapes of different sizes")
                    need = pending.pop()
                if need % size == 0:
                    part = size
                elif size % need == 0:
                    part = need
                else:
                    raise NotFusable("shapes whose borders do not line up")
                out.append((part, row))
                need //= part
                size //= part
        if pending or need != 1:
            raise NotFusable("shapes of different sizes")
        self._segments = out[::-1]


def _count(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _group(shape: Sequence[int], variables: list[Var]) -> tuple[Index, ...]:
    """The index into `shape` whose dims are runs of `variables`."""
    rest = list(variables)
    out: list[Index] = []
    for size in shape:
        place, covered = lift(0), 1
        while covered < size:
            if not rest:
                raise NotFusable("shapes of different sizes")
            v = rest.pop(0)
            place = place * v.size + var(v.name, v.size)
            covered *= v.size
        if covered != size:
            raise NotFusable("shapes whose borders do not line up")
        out.append(place)
    if rest:
        raise NotFusable("shapes of different sizes")
    return tuple(out)


def build_scan(
    name: str,
    scan: Scan,
    epilogue: Sequence[Map],
    kept: Callable[[Value], bool],
    stored: Callable[[Value], bool],
) -> ScanKernel:
    """A scan with the pointwise values computed from each of its elements."""
    variables = [Var(f"s{k}", size) for k, size in enumerate(scan.shape)]
    place = tuple(var(v.name, v.size) for v in variables)
    held: dict[Value, Expr] = {scan: expr("local", (), scan.type, "running")}

    def local(value: Value, index: tuple[Index, ...]) -> Expr | None:
        if value not in held:
            return None
        if index != place:
            raise NotFusable(f"{value.name} is needed at another place than where it is computed")
        return held[value]

    builder = Builder(stored, local)
    body = scan.body(Builder(stored), place)
    for value in epilogue:
        if value.shape != scan.shape:
            raise NotFusable(f"{value.name} has another shape than the scan")
        held[value] = value.body(builder, place)
    flat = linearize(place, scan.shape)
    out = [Store(v.name, flat, e) for v, e in held.items() if kept(v)]
    dim = variables[scan.dim]
    before, after = variables[: scan.dim], variables[scan.dim + 1 :]
    outer = [*(v for v in before if v.size > 1), *(v for v in after if v.size > 1)]
    contiguous = not any(v.size > 1 for v in after)
    kernel = ScanKernel(name, tuple(outer), dim, scan.kind, body, out, [], contiguous)
    return kernel


def _layout(kernel: LoopKernel) -> str:
    if not any(p.accumulate for p in kernel.passes):
        return "pointwise"
    if not kernel.row:
        return "row"
    if not kernel.outer:
        return "row"
    along_row = along_outer = 0
    for e in loads(kernel):
        stride_row = e.attr[1].coefficient(kernel.row[-1])
        stride_outer = e.attr[1].coefficient(kernel.outer[-1])
        along_row += stride_row == 1
        along_outer += stride_outer == 1
        along_outer -= stride_outer > 1
        along_row -= stride_row > 1
    return "column" if along_outer > along_row else "row"
