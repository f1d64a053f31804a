"""C++ for reductions whose contiguous loop is an outer one, and for scans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel_agent.expert.index import Var
from kernel_agent.expert.ir import Expr
from kernel_agent.expert.kernels import Accumulate, LoopKernel, Pass, ScanKernel
from kernel_agent.expert.print_cpp import (
    CHUNK,
    SHORT,
    _combine,
    loop,
    nest,
    parallel,
    start_value,
    store_line,
)
from kernel_agent.expert.printer import C_TYPE, Dialect, Scope, indent

if TYPE_CHECKING:
    from kernel_agent.expert.print_cpp import CppFile

BLOCK = 256  # columns one thread works on at a time; their partial results stay in its cache


def columns(file: CppFile, kernel: LoopKernel) -> list[str]:
    """A block of neighbouring columns at a time: walk the rows in order, vectorised across the
    block."""
    *lead, column = kernel.outer
    block = min(file.params.get("column_block", BLOCK), column.size)
    dialect = file.dialect()
    dialect.local = lambda name: f"{name}[{column.name} - begin]"
    scope = Scope(dialect)
    lines = [
        f"const int64_t end = std::min<int64_t>(begin + {block}, {column.size});"
        if column.size % block
        else f"const int64_t end = begin + {block};"
    ]
    for p in kernel.passes:
        if p.walks:
            lines += _invariants(scope, p, kernel, column, block)
            lines += _pass(file, scope, p, kernel, column, block)
        if p.after:
            inner = scope.child()
            inner.prepare(s.value for s in p.after)
            for s in p.after:
                inner.lines.append(store_line(file, inner, s))
            lines += _across(column, inner.lines)
    outer = [
        f"for (int64_t begin = 0; begin < {column.size}; begin += {block}) {{",
        *indent(lines),
        "}",
    ]
    collapse = f" collapse({len(lead) + 1})" if lead else ""
    return (
        nest(lead, outer, f"#pragma omp parallel for{collapse} schedule(static)")
        if lead
        else [
            "#pragma omp parallel for schedule(static)",
            *outer,
        ]
    )


def _across(column: Var, body: list[str]) -> list[str]:
    return ["#pragma omp simd", loop(column, "begin", "end"), *indent(body), "}"]


def _pass(
    file: CppFile, scope: Scope, p: Pass, kernel: LoopKernel, column: Var, block: int
) -> list[str]:
    steps = 1
    for v in kernel.row:
        steps *= v.size
    lines: list[str] = []
    starts: list[str] = []
    for a in p.accumulate:
        kind = (
            "double" if a.kind == "sum" and a.type == "float" and steps > CHUNK else C_TYPE[a.type]
        )
        lines.append(f"{kind} {a.name}[{block}];")
        starts.append(f"{a.name}[{column.name} - begin] = {_start(a)};")
        if a.kind.startswith("arg"):
            lines.append(f"{C_TYPE[a.value.type]} {a.name}_best[{block}];")
            sign = "-" if a.kind == "argmax" else ""
            starts.append(f"{a.name}_best[{column.name} - begin] = {sign}INFINITY;")
    if starts:
        lines += [loop(column, "begin", "end"), *indent(starts), "}"]
    inner = scope.child()
    inner.prepare([*(a.value for a in p.accumulate), *(s.value for s in p.stores)])
    for a in p.accumulate:
        _accumulate(file, inner, a, column, kernel)
    for s in p.stores:
        inner.lines.append(store_line(file, inner, s))
    return lines + nest(kernel.row, _across(column, inner.lines))


def _start(a: Accumulate) -> str:
    return "0" if a.kind.startswith("arg") else start_value(a, a.type)


def _accumulate(
    file: CppFile, scope: Scope, a: Accumulate, column: Var, kernel: LoopKernel
) -> None:
    into = f"{a.name}[{column.name} - begin]"
    if not a.kind.startswith("arg"):
        _combine(file, scope, a, into)
        return
    sign = ">" if a.kind == "argmax" else "<"
    value = scope.text(a.value)
    v = scope.names.get(a.value) or scope.named(a.value, value)
    best = f"{a.name}_best[{column.name} - begin]"
    at = kernel.row[0].name if kernel.row else "0"
    for w in kernel.row[1:]:
        at = f"({at}) * {w.size} + {w.name}"
    scope.lines += [
        f"const bool better = {v} {sign} {best} || ({v} != {v} && {best} == {best});",
        f"{best} = better ? {v} : {best};",
        f"{into} = better ? {at} : {into};",
    ]


def _invariants(scope: Scope, p: Pass, kernel: LoopKernel, column: Var, block: int) -> list[str]:
    """What does not change along the rows is computed once for each column of the block."""
    found: list[Expr] = []
    seen: set[Expr] = set()

    def visit(e: Expr) -> None:
        if e in seen or e in scope.names:
            return
        seen.add(e)
        if not e.variables & set(kernel.row):
            if e.op not in ("const", "local", "index", "load"):
                found.append(e)
            return
        for a in e.args:
            visit(a)

    for root in [*(a.value for a in p.accumulate), *(s.value for s in p.stores)]:
        visit(root)
    if not found:
        return []
    lines: list[str] = []
    inner = scope.child()
    inner.prepare(found)
    for e in found:
        inner.counter[0] += 1
        name = f"{e.op}_column{inner.counter[0]}"
        lines.append(f"{C_TYPE[e.type]} {name}[{block}];")
        place = f"{name}[{column.name} - begin]"
        inner.lines.append(f"{place} = {inner.text(e)};")
        scope.names[e] = place
    return lines + _across(column, inner.lines)


def scan(file: CppFile, kernel: ScanKernel) -> list[str]:
    """Lines in parallel. A contiguous line is walked in order; otherwise neighbouring lines
    advance together."""
    start = {
        "sum": "0",
        "prod": "1",
        "max": "-INFINITY",
        "min": "INFINITY",
        "logaddexp": "-INFINITY",
    }[kernel.kind]
    kind = C_TYPE[kernel.value.type]
    wide = "double" if kind == "float" and kernel.kind in ("sum", "prod") else kind
    if kind == "int":
        start = {"max": "INT64_MIN", "min": "INT64_MAX"}.get(kernel.kind, start)
    dialect = file.dialect()
    if kernel.contiguous or kernel.outer[-1].size < SHORT:
        body = _scan_step(file, dialect, kernel, "running", kind)
        lines = [f"{wide} running = {start};", loop(kernel.dim), *indent(body), "}"]
        return nest(kernel.outer, lines, parallel(kernel.outer))
    *lead, column = kernel.outer
    block = min(BLOCK, column.size)
    into = f"running[{column.name} - begin]"
    body = _scan_step(file, dialect, kernel, into, kind)
    lines = [
        f"const int64_t end = std::min<int64_t>(begin + {block}, {column.size});",
        f"{wide} running[{block}];",
        loop(column, "begin", "end"),
        f"    {into} = {start};",
        "}",
        loop(kernel.dim),
        *indent(_across(column, body)),
        "}",
    ]
    outer = [
        f"for (int64_t begin = 0; begin < {column.size}; begin += {block}) {{",
        *indent(lines),
        "}",
    ]
    collapse = f" collapse({len(lead) + 1})" if lead else ""
    pragma = f"#pragma omp parallel for{collapse} schedule(static)"
    return nest(lead, outer, pragma) if lead else [pragma, *outer]


def _scan_step(
    file: CppFile, dialect: Dialect, kernel: ScanKernel, into: str, kind: str
) -> list[str]:
    scope = Scope(dialect)
    scope.prepare([kernel.value])
    value = scope.text(kernel.value)
    if kernel.kind in ("sum", "prod"):
        scope.lines.append(f"{into} {'+' if kernel.kind == 'sum' else '*'}= {value};")
    elif kernel.kind == "logaddexp":
        scope.lines.append(f"{into} = {dialect.help('log_add_exp', into, value)};")
    else:
        scope.lines.append(f"{into} = {dialect.help('nan_' + kernel.kind, into, value)};")
    dialect.local = lambda name: f"({kind}){into}"
    scope.uses.clear()
    scope.prepare(s.value for s in kernel.stores)
    for s in kernel.stores:
        scope.lines.append(store_line(file, scope, s))
    return scope.lines
