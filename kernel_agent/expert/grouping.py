"""The optimized plan: which values share a kernel.

1. Every reduction, scan and output is an anchor. Other pointwise values are computed where they
are read, unless
   that would repeat much work; then they become anchors too.
2. A long reduction with few results is split in two, so that there is enough to do in parallel.
3. Anchors join the kernel of what they read, as long as the merged kernel can be built:
build_loops proves it, by
   finding every value at the place where it was computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kernel_agent.expert.build import build_loops, build_scan
from kernel_agent.expert.ir import (
    Builder,
    Graph,
    Map,
    NotFusable,
    Reduce,
    Scan,
    Source,
    Value,
)
from kernel_agent.expert.kernels import Kernel, LoopKernel, ScanKernel, reads
from kernel_agent.expert.lowering import numel
from kernel_agent.expert.plan import Plan, kernel_name, make_plan, separate_outputs
from kernel_agent.expert.split_reduction import FEW_ROWS, LONG, split

RE_READERS = ("index", "_unsafe_index", "gather", "embedding", "index_select")
CHEAP = {
    "add",
    "sub",
    "mul",
    "neg",
    "abs",
    "max",
    "min",
    "where",
    "cast",
    "relu",
    "load",
    "const",
    "index",
    "inside",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "and",
    "or",
    "not",
}


@dataclass
class Group:
    """Values computed by one kernel, operands first."""

    members: list[Value]
    position: int

    @property
    def scan(self) -> Scan | None:
        return next((v for v in self.members if isinstance(v, Scan)), None)

    @property
    def reuses(self) -> bool:
        return any(isinstance(v, Reduce) and v.reuse for v in self.members)


@dataclass
class Planner:
    graph: Graph
    anchors: set[Value]
    alias: dict[Value, Value] = field(default_factory=dict)  # a split reduction -> its second half
    needs: dict[Value, set[Value]] = field(
        default_factory=dict
    )  # anchor -> anchors and sources it reads
    groups: list[Group] = field(default_factory=list)

    def resolve(self, value: Value) -> Value:
        return self.alias.get(value, value)

    def order(self) -> list[Value]:
        """Anchors, operands first, split reductions as their two halves."""
        out: list[Value] = []
        for value in self.graph.values():
            if value in self.anchors:
                second = self.resolve(value)
                if second is not value:
                    out += second.inputs
                out.append(second)
        return out

    def read_by(self, value: Value) -> set[Value]:
        """The anchors and sources an anchor reads, through the values computed in place."""
        found: set[Value] = set()
        seen: set[Value] = set()

        def visit(v: Value) -> None:
            for operand in v.inputs:
                if operand in seen:
                    continue
                seen.add(operand)
                if operand in self.anchors or isinstance(operand, Source):
                    found.add(self.resolve(operand))
                else:
                    visit(operand)

        if value not in self.anchors and value in self.second_halves():
            return set(value.inputs)
        visit(value)
        return found

    def second_halves(self) -> set[Value]:
        return set(self.alias.values())

    def stored(self, members: Sequence[Value]) -> set[Value]:
        halves = {v for second in self.alias.values() for v in (second, *second.inputs)}
        return (self.anchors | halves) - set(members)

    def build(self, group: Group, name: str, kept: set[Value] | None) -> Kernel:
        """The kernel of a group; without `kept`, one that stores every member."""
        stored = self.stored(group.members)

        def keep(value: Value) -> bool:
            return kept is None or value in kept

        scan = group.scan
        if scan is not None:
            rest = [v for v in group.members if isinstance(v, Map)]
            return build_scan(name, scan, rest, keep, stored.__contains__)
        return build_loops(name, group.members, keep, stored.__contains__, self.alias)


def optimized_plan(graph: Graph) -> Plan:
    """As few kernels as can be proved to share their loops."""
    graph = separate_outputs(graph)
    extra: set[Value] = set()
    for _ in range(4):
        planner = _group(graph, extra)
        repeated = _repeated_work(planner) - extra
        if not repeated:
            break
        extra |= repeated
    return _finish(planner)


def _group(graph: Graph, extra: set[Value]) -> Planner:
    anchors = (
        {v for v in graph.values() if isinstance(v, Reduce | Scan)} | set(graph.outputs) | extra
    )
    anchors |= _read_many_times(graph)
    planner = Planner(graph, anchors)
    anchors |= _spread_out(planner)
    for value in graph.values():
        if isinstance(value, Reduce):
            halves = split(value)
            if halves is not None:
                planner.alias[value] = halves
    for value in planner.order():
        planner.needs[value] = planner.read_by(value)
        home = next((g for g in _candidates(planner, value) if _joins(planner, g, value)), None)
        if home is None:
            planner.groups.append(Group([value], len(planner.groups)))
        else:
            home.members.append(value)
    return planner


def _read_many_times(graph: Graph) -> set[Value]:
    """Computed values that their reader visits again and again: better stored."""
    found: set[Value] = set()
    for value in graph.values():
        if isinstance(value, Reduce) and value.reuse:
            found |= {v for v in map(_behind_views, value.inputs) if _computed(v)}
        elif isinstance(value, Map) and value.op.split(".")[0] in RE_READERS:
            source = _behind_views(value.inputs[0])
            if _computed(source) and numel(value.shape) >= numel(source.shape):
                found.add(source)
    return found


def _spread_out(planner: Planner) -> set[Value]:
    """Costly values that are broadcast or repeated: computed once, not once per copy. Those that
    follow a reduction are left in place, for a row program computes them between its passes."""
    found: set[Value] = set()
    for value in planner.graph.values():
        size = numel(value.domain if isinstance(value, Reduce) else value.shape)
        for operand in map(_behind_views, value.inputs):
            if (
                operand not in planner.anchors
                and _computed(operand)
                and size >= 2 * numel(operand.shape)
            ):
                after = any(isinstance(v, Reduce) for v in planner.read_by(operand))
                found |= {operand} if not after and _costly(planner, operand) else set()
    return found


def _behind_views(value: Value) -> Value:
    while isinstance(value, Map) and value.view and len(value.inputs) == 1:
        value = value.inputs[0]
    return value


def _computed(value: Value) -> bool:
    return isinstance(value, Map) and not value.view and bool(value.inputs)


def _repeated_work(planner: Planner) -> set[Value]:
    """Costly values computed in place by more than one kernel."""
    homes: dict[Value, set[int]] = {}
    for group in planner.groups:
        for value in _in_place(planner, group):
            homes.setdefault(value, set()).add(group.position)
    shared = {v for v, where in homes.items() if len(where) > 1 and _costly(planner, v)}
    # Storing the last of a chain is enough: what feeds only it is then computed once.
    feeding = {operand for v in shared for operand in _closure(planner, v)}
    return shared - feeding


def _in_place(planner: Planner, group: Group) -> set[Value]:
    found: set[Value] = set()
    for member in group.members:
        for operand in member.inputs:
            if operand not in planner.anchors:
                found |= {operand} | _closure(planner, operand)
    return {v for v in found if _computed(v)}


def _closure(planner: Planner, value: Value) -> set[Value]:
    """What is computed in place to compute `value`, itself left out."""
    found: set[Value] = set()
    pending = list(value.inputs)
    while pending:
        v = pending.pop()
        if v in found or v in planner.anchors or isinstance(v, Source):
            continue
        found.add(v)
        pending += v.inputs
    return found


def _costly(planner: Planner, value: Value) -> bool:
    """More than a few cheap operations, or more than one full-size tensor read."""
    from kernel_agent.expert.index import var
    from kernel_agent.expert.ir import walk

    stored = planner.stored([])
    place = tuple(var(f"c{d}", size) for d, size in enumerate(value.shape))
    nodes = list(walk([Builder(stored.__contains__).load(value, place)]))
    big = {e.attr[0] for e in nodes if e.op == "load" and e.variables}
    return any(e.op not in CHEAP for e in nodes) or len(big) > 1


def _candidates(planner: Planner, value: Value) -> list[Group]:
    """Groups that `value` may join without a cycle, the latest first: those it reads from, then
    those that read the same tensors."""
    if isinstance(value, Scan) or (isinstance(value, Reduce) and value.reuse):
        return []
    needs = planner.needs[value]
    before = {g.position for g in planner.groups if needs & set(g.members)}
    sharing = [
        g for g in planner.groups
        if g.position not in before
        and isinstance(value, Reduce)
        and any(needs & planner.needs[m] for m in g.members)
    ]  # fmt: skip
    feeding = [g for g in planner.groups if g.position in before]
    choices = [*reversed(feeding), *reversed(sharing)]
    return [g for g in choices if not _would_cycle(planner, g, before - {g.position})]


def _would_cycle(planner: Planner, home: Group, others: Iterable[int]) -> bool:
    """Whether something the value reads is itself computed after `home`."""
    pending, seen = list(others), set()
    by_position = {g.position: g for g in planner.groups}
    while pending:
        position = pending.pop()
        if position == home.position:
            return True
        if position in seen:
            continue
        seen.add(position)
        needs = {n for m in by_position[position].members for n in planner.needs[m]}
        pending += [
            g.position for g in planner.groups if needs & set(g.members) and g.position != position
        ]
    return False


def _joins(planner: Planner, group: Group, value: Value) -> bool:
    if (group.scan or group.reuses) and not isinstance(value, Map):
        return False
    if group.reuses and numel(value.shape) != numel(group.members[0].shape):
        return False
    merged = Group([*group.members, value], group.position)
    try:
        kernel = planner.build(merged, "trial", None)
    except NotFusable:
        return False
    if isinstance(kernel, LoopKernel) and not group.reuses:
        return not _starves(kernel)
    return True


def _starves(kernel: LoopKernel) -> bool:
    """Few long rows walked more than once: one kernel would leave most of the device idle."""
    outer, row = _count(kernel.outer), _count(kernel.row)
    return outer < FEW_ROWS and outer * row >= LONG and sum(p.walks for p in kernel.passes) > 1


def _count(loops: Sequence[object]) -> int:
    total = 1
    for v in loops:
        total *= getattr(v, "size", 1)
    return total


def _finish(planner: Planner) -> Plan:
    """Build the kernels in dependency order, storing only what another kernel or the caller
    reads."""
    ordered = _sorted(planner)
    outputs = {planner.resolve(v) for v in planner.graph.outputs}
    names = {name for g in ordered for name in reads(planner.build(g, "trial", None))}
    kernels: list[Kernel] = []
    stored: list[Value] = []
    for position, group in enumerate(ordered):
        kept = {v for v in group.members if v in outputs or v.name in names}
        kernel = planner.build(group, kernel_name(_shown(planner, group), position), kept)
        kernel.comment = _comment(group, kernel, kept)
        kernels.append(kernel)
        stored += [v for v in group.members if v in kept]
    return make_plan("optimized", planner.graph, [*planner.graph.sources, *stored], kernels)


def _sorted(planner: Planner) -> list[Group]:
    home = {v: g for g in planner.groups for v in g.members}
    out: list[Group] = []

    def visit(group: Group) -> None:
        if group in out:
            return
        for member in group.members:
            for need in planner.needs[member]:
                if need in home and home[need] is not group:
                    visit(home[need])
        out.append(group)

    for group in planner.groups:
        visit(group)
    return out


def _shown(planner: Planner, group: Group) -> list[Value]:
    """The computing values of a group, in order, for its name."""
    inside = _in_place(planner, group) | set(group.members)
    order = [v for v in planner.graph.values() if v in inside]
    return [
        v
        for v in [*order, *(m for m in group.members if m not in order)]
        if _computed(v) or not isinstance(v, Map)
    ]


def _comment(group: Group, kernel: Kernel, kept: set[Value]) -> list[str]:
    outputs = ", ".join(
        f"{v.name} ({'x'.join(map(str, v.shape)) or 'scalar'})" for v in group.members if v in kept
    )
    lines = [f"Writes {outputs}."]
    if isinstance(kernel, ScanKernel):
        return [*lines, f"An ordered walk over {kernel.dim.size} elements for each line."]
    walks = sum(p.walks for p in kernel.passes)
    if kernel.layout == "pointwise":
        return [
            *lines,
            "Every element is computed once, from what it needs, in one pass over memory.",
        ]
    kind = "contiguous rows" if kernel.layout == "row" else "neighbouring columns"
    return [
        *lines,
        f"{_count(kernel.outer)} {kind} of {_count(kernel.row)} elements, "
        f"{walks} pass(es) over each.",
    ]
