"""Kernels as C++ with OpenMP: parallel outer loops, vectorised inner loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kernel_agent.expert.cpp_helpers import preamble
from kernel_agent.expert.index import Var
from kernel_agent.expert.ir import Expr, Value, walk
from kernel_agent.expert.kernels import (
    Accumulate,
    Kernel,
    LoopKernel,
    Pass,
    ScanKernel,
    Store,
    reads,
    shared_values,
    walked,
    writes,
)
from kernel_agent.expert.params import Params
from kernel_agent.expert.plan import Plan
from kernel_agent.expert.printer import C_TYPE, LIBRARY, Dialect, Scope, indent, wrapped

STORAGE = {
    "float32": "float",
    "bfloat16": "uint16_t",
    "float64": "double",
    "int64": "int64_t",
    "int32": "int32_t",
    "int16": "int16_t",
    "int8": "int8_t",
    "uint8": "uint8_t",
    "bool": "bool",
}
START = {
    "sum": "0",
    "prod": "1",
    "max": "-INFINITY",
    "min": "INFINITY",
    "any": "false",
    "all": "true",
}
START_INT = {"max": "INT64_MIN", "min": "INT64_MAX"}
CLAUSE = {"sum": "+", "prod": "*", "max": "nan_max", "min": "nan_min", "any": "||", "all": "&&"}
CHUNK = 2048  # a float sum runs over at most this many elements before it is added to a double
MAX_KEPT = 2**16  # elements of a row that are kept in a buffer between passes
SHORT = 16  # inner loops below this are not worth vectorising


@dataclass
class CppFile:
    """One translation unit being written."""

    plan: Plan
    params: Params
    helpers: set[str] = field(default_factory=set)
    functions: set[str] = field(default_factory=set)
    reductions: set[str] = field(default_factory=set)

    def dialect(self) -> Dialect:
        def load(buffer: str, index: str) -> str:
            dtype = self.plan.buffers[buffer].dtype
            if dtype == "bfloat16":
                return f"bf16_to_float({buffer}[{index}])"
            plain = dtype in ("float32", "float64", "int64", "bool")
            return f"{buffer}[{index}]" if plain else f"(int64_t){buffer}[{index}]"

        return Dialect(load, lambda name: name, helpers=self.helpers, functions=self.functions)


def print_cpp(plan: Plan, params: Params) -> str:
    """The text of kernels/kernels.cpp."""
    file = CppFile(plan, params)
    bodies = [_function(file, kernel) for kernel in plan.kernels]
    used = {b for k in plan.kernels for b in (*reads(k), *writes(k))}
    bf16 = any(plan.buffers[b].dtype == "bfloat16" for b in used)
    lines = preamble(file.helpers, file.functions, bf16, file.reductions)
    for body in bodies:
        lines += [*body, ""]
    return "\n".join(lines).rstrip() + "\n"


def _function(file: CppFile, kernel: Kernel) -> list[str]:
    arguments = parameters(kernel, file.plan.buffers, STORAGE, "__restrict")
    lines = [f"// {text}" for text in kernel.comment]
    lines += [f'extern "C" int {kernel.name}(', *indent(arguments), ") {"]
    if isinstance(kernel, ScanKernel):
        body = _scan(file, kernel)
    elif kernel.layout == "pointwise":
        body = _pointwise(file, kernel)
    elif kernel.layout == "row":
        body = _rows(file, kernel)
    else:
        body = _columns(file, kernel)
    return [*lines, *indent(body), "    return 0;", "}"]


def parameters(
    kernel: Kernel, buffers: dict[str, Value], storage: dict[str, str], restrict: str
) -> list[str]:
    """The launcher's parameters, one a line: what it reads, what it writes, the stream."""
    gap = f"* {restrict} " if restrict else "* "
    lines = [f"const {storage[buffers[b].dtype]}{gap}{b}," for b in reads(kernel)]
    lines += [f"{storage[buffers[b].dtype]}{gap}{b}," for b in writes(kernel)]
    return [*lines, "void* stream"]


def loop(v: Var, start: str = "0", stop: str | None = None) -> str:
    return f"for (int64_t {v.name} = {start}; {v.name} < {stop or v.size}; ++{v.name}) {{"


def nest(loops: Sequence[Var], body: list[str], pragma: str = "") -> list[str]:
    """`body` inside loops; a pragma goes above the first of them."""
    for v in reversed(loops):
        body = [loop(v), *indent(body), "}"]
    return [pragma, *body] if pragma and loops else body


def parallel(loops: Sequence[Var]) -> str:
    collapse = f" collapse({len(loops)})" if len(loops) > 1 else ""
    return f"#pragma omp parallel for{collapse} schedule(static)" if loops else ""


def store_line(file: CppFile, scope: Scope, store: Store) -> str:
    dtype = file.plan.buffers[store.buffer].dtype
    value = scope.text(store.value)
    if dtype == "bfloat16":
        value = f"float_to_bf16({value})"
    elif dtype not in ("float32", "float64", "int64", "bool"):
        value = f"({STORAGE[dtype]})({value})"
    return f"{store.buffer}[{scope.index(store.index)}] = {value};"


def _stores(file: CppFile, scope: Scope, stores: Sequence[Store]) -> list[str]:
    scope.prepare(s.value for s in stores)
    for s in stores:
        scope.lines.append(store_line(file, scope, s))
    return scope.lines


def _pointwise(file: CppFile, kernel: LoopKernel) -> list[str]:
    body = _stores(
        file, Scope(file.dialect()), [s for p in kernel.passes for s in (*p.stores, *p.after)]
    )
    if not kernel.outer:
        return body
    *lead, last = kernel.outer
    steps = 1
    for v in lead:
        steps *= v.size
    if not lead:
        return ["#pragma omp parallel for simd schedule(static)", loop(last), *indent(body), "}"]
    if (
        steps < 64 and last.size > 4 * CHUNK
    ):  # too few outer steps to share: also share blocks of the last loop
        begin = f"begin_{last.name}"
        inner = [
            f"const int64_t end = std::min<int64_t>({begin} + {CHUNK}, {last.size});",
            "#pragma omp simd",
            loop(last, begin, "end"),
            *indent(body),
            "}",
        ]
        block = [
            f"for (int64_t {begin} = 0; {begin} < {last.size}; {begin} += {CHUNK}) {{",
            *indent(inner),
            "}",
        ]
        pragma = f"#pragma omp parallel for collapse({len(lead) + 1}) schedule(static)"
        return nest(lead, block, pragma)
    inner = [loop(last), *indent(body), "}"]
    return nest(lead, ["#pragma omp simd", *inner] if last.size >= SHORT else inner, parallel(lead))


def _rows(file: CppFile, kernel: LoopKernel) -> list[str]:
    """One outer step at a time: each pass walks its row with a vectorised inner loop."""
    scope = Scope(file.dialect())
    kept = _kept_rows(file, kernel)
    known: dict[Expr, str] = {}
    for position, p in enumerate(kernel.passes):
        if p.walks:
            row_invariants(scope, p, kernel.row)
            _row_pass(file, scope, kernel, p, known, kept[position])
            known |= kept[position]
        scope.uses.clear()
        _stores(file, scope, p.after)
    if not known:
        return nest(kernel.outer, scope.lines, parallel(kernel.outer))
    size = _total(kernel.row)
    rows = [
        f"std::vector<{C_TYPE[e.type]}> {name.split('[')[0]}({size});" for e, name in known.items()
    ]
    pragma = parallel(kernel.outer).replace("parallel for", "for")
    body = [*rows, *nest(kernel.outer, scope.lines, pragma)]
    return ["#pragma omp parallel", "{", *indent(body), "}"] if kernel.outer else body


def _kept_rows(file: CppFile, kernel: LoopKernel) -> list[dict[Expr, str]]:
    """For each pass, costly values along the row that a later pass reads from a buffer instead of
    computing again."""
    size = _total(kernel.row)
    nothing: list[dict[Expr, str]] = [{} for _ in kernel.passes]
    if not file.params.get("keep_row", 1) or size > MAX_KEPT:
        return nothing
    place = linear(kernel.row)
    serial = 0
    for position, found in enumerate(shared_values(kernel)):
        for e in found:
            if any(x.op in LIBRARY or x.op in ("sigmoid", "rsqrt") for x in walk([e])):
                serial += 1
                nothing[position][e] = f"{e.op}_kept{serial}[{place}]"
    return nothing


def _total(loops: Sequence[Var]) -> int:
    total = 1
    for v in loops:
        total *= v.size
    return total


def linear(loops: Sequence[Var]) -> str:
    """The position of a step of nested loops."""
    text = loops[0].name if loops else "0"
    for v in loops[1:]:
        text = f"{wrapped(text)} * {v.size} + {v.name}"
    return text


def row_invariants(scope: Scope, p: Pass, row: Sequence[Var]) -> None:
    """Compute once what does not change along the row."""
    found: list[Expr] = []
    seen: set[Expr] = set()

    def visit(e: Expr) -> None:
        if e in seen or e in scope.names:
            return
        seen.add(e)
        if not e.variables & set(row):
            if e.op not in ("const", "local", "index"):
                found.append(e)
            return
        for a in e.args:
            visit(a)

    roots = [a.value for a in p.accumulate] + [s.value for s in p.stores]
    for root in roots:
        visit(root)
    scope.uses.clear()
    scope.prepare(found)
    for e in found:
        scope.named(e)
    scope.uses.clear()


def _row_pass(
    file: CppFile,
    scope: Scope,
    kernel: LoopKernel,
    p: Pass,
    known: dict[Expr, str],
    keep: dict[Expr, str],
) -> None:
    total = _total(kernel.row)
    last = kernel.row[-1] if kernel.row else None
    blocked = bool(p.accumulate) and last is not None and total > CHUNK
    simd = (
        last is not None
        and last.size >= SHORT
        and not any(a.kind.startswith("arg") for a in p.accumulate)
    )
    inner = scope.child()
    inner.names |= known
    inner.prepare(walked(p))
    for e, name in keep.items():
        inner.lines.append(f"{name} = {inner.text(e)};")
        inner.names[e] = name
    split = {a for a in p.accumulate if blocked and simd and a.kind == "sum" and a.type == "float"}
    for a in p.accumulate:
        _declare(file, scope.lines, a, wide=blocked)
        _combine(
            file,
            inner,
            a,
            f"{a.name}_part" if a in split else a.name + ("_total" if _wide(a, blocked) else ""),
        )
    for s in p.stores:
        inner.lines.append(store_line(file, inner, s))
    body: list[str] = inner.lines
    if last is not None:
        body = _inner_loop(last, body, p, split, blocked, simd)
    scope.lines += nest(kernel.row[:-1], body)
    for a in p.accumulate:
        if _wide(a, blocked):
            scope.lines.append(f"const float {a.name} = (float){a.name}_total;")


def _wide(a: Accumulate, blocked: bool) -> bool:
    return blocked and a.kind == "sum" and a.type == "float"


def _inner_loop(
    last: Var, body: list[str], p: Pass, split: set[Accumulate], blocked: bool, simd: bool
) -> list[str]:
    names = [
        (CLAUSE[a.kind], a.name + ("_part" if a in split else "")) for a in p.accumulate if simd
    ]
    pragma = "#pragma omp simd" + "".join(f" reduction({c}:{n})" for c, n in names)
    if not split:
        return [*([pragma] if simd else []), loop(last), *indent(body), "}"]
    parts = [f"float {a.name}_part = 0.0f;" for a in p.accumulate if a in split]
    adds = [f"{a.name}_total += {a.name}_part;" for a in p.accumulate if a in split]
    if last.size <= CHUNK:
        return [*parts, pragma, loop(last), *indent(body), "}", *adds]
    block = [
        f"const int64_t end = std::min<int64_t>(begin + {CHUNK}, {last.size});",
        *parts,
        pragma,
        loop(last, "begin", "end"),
        *indent(body),
        "}",
        *adds,
    ]
    return [
        f"for (int64_t begin = 0; begin < {last.size}; begin += {CHUNK}) {{",
        *indent(block),
        "}",
    ]


def start_value(a: Accumulate, type: str) -> str:
    if type == "int":
        return START_INT.get(a.kind, START.get(a.kind, "0"))
    return {"sum": "0.0f", "prod": "1.0f"}.get(a.kind, START[a.kind])


def _declare(file: CppFile, lines: list[str], a: Accumulate, wide: bool) -> None:
    if a.kind in ("argmax", "argmin"):
        sign = "-" if a.kind == "argmax" else ""
        kind = C_TYPE[a.value.type]
        low = f"{sign}INFINITY" if a.value.type != "int" else ("INT64_MIN" if sign else "INT64_MAX")
        lines += [
            f"{kind} {a.name}_best = {low};",
            f"int64_t {a.name} = 0;",
            f"int64_t {a.name}_at = 0;",
        ]
    elif _wide(a, wide):
        lines.append(f"double {a.name}_total = 0.0;")
    else:
        lines.append(f"{C_TYPE[a.type]} {a.name} = {start_value(a, a.type)};")


def _combine(file: CppFile, scope: Scope, a: Accumulate, into: str) -> None:
    value = scope.text(a.value)
    if a.kind in ("argmax", "argmin"):
        sign = ">" if a.kind == "argmax" else "<"
        v = scope.names.get(a.value) or scope.named(a.value, value)
        best = f"{a.name}_best"
        scope.lines += [
            f"if ({v} {sign} {best} || ({v} != {v} && {best} == {best})) {{",
            f"    {best} = {v};",
            f"    {a.name} = {a.name}_at;",
            "}",
            f"++{a.name}_at;",
        ]
    elif a.kind in ("max", "min"):
        name = f"nan_{a.kind}"
        file.reductions |= {name} if a.type == "float" else set()
        file.helpers.add(name)
        scope.lines.append(f"{into} = {name}({into}, {value});")
    else:
        sign = {"sum": "+=", "prod": "*=", "any": "|=", "all": "&="}[a.kind]
        scope.lines.append(f"{into} {sign} {value};")


def _columns(file: CppFile, kernel: LoopKernel) -> list[str]:
    from kernel_agent.expert.print_cpp_columns import columns

    return columns(file, kernel)


def _scan(file: CppFile, kernel: ScanKernel) -> list[str]:
    from kernel_agent.expert.print_cpp_columns import scan

    return scan(file, kernel)
