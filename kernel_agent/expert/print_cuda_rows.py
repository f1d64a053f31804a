"""CUDA for reductions: a warp or a block for each row, and blocks of columns for rows that are not
contiguous."""

from __future__ import annotations

from dataclasses import dataclass, field

from kernel_agent.expert.ir import Expr
from kernel_agent.expert.kernels import Accumulate, LoopKernel, Pass, shared_values, walked
from kernel_agent.expert.kernels import loads as all_loads
from kernel_agent.expert.kernels import stores as all_stores
from kernel_agent.expert.print_cpp import row_invariants
from kernel_agent.expert.print_cuda import (
    CudaFile,
    Launch,
    combine,
    count,
    declare,
    elements,
    part_name,
    row_place,
    store_line,
    unravel,
    vector_loads,
    vector_stores,
    vector_width,
)
from kernel_agent.expert.printer import C_TYPE, Scope, indent

MAX_CACHED = 64  # elements of one cached value a thread may keep in registers


@dataclass
class Rows:
    """How the rows of one kernel are shared out."""

    threads: int  # per row
    rows: int  # per block
    width: int  # elements per access
    chunks: int  # accesses per thread; 0: a loop over the row that caches nothing
    cached: list[dict[Expr, str]] = field(
        default_factory=list
    )  # per pass: values kept for later passes

    def slot(self, name: str) -> str:
        """Where a thread keeps the current element of a cached value."""
        return f"{name}[c * {self.width} + e]" if self.width > 1 else f"{name}[c]"


def rows(file: CudaFile, kernel: LoopKernel) -> Launch:
    """`threads` threads walk one row together; each pass ends in a combine over them."""
    how = _share_out(file, kernel)
    scope = Scope(file.dialect())
    steps = count(kernel.outer)
    line = f"const {file.int_type} step = blockIdx.x"
    if how.rows > 1:
        scope.lines += [f"{line} * {how.rows} + threadIdx.y;", f"if (step >= {steps}) return;"]
    elif kernel.outer:
        scope.lines.append(line + ";")
    scope.lines += unravel(file, "step", kernel.outer)
    if how.threads > 32:
        scope.lines.append("__shared__ double scratch[64];")
    else:
        scope.lines.append("void* scratch = nullptr;  // a warp needs none")
    for kept in how.cached:
        for e, name in kept.items():
            scope.lines.append(f"{C_TYPE[e.type]} {name}[{how.chunks * how.width}];")
    known: dict[Expr, str] = {}
    for position, p in enumerate(kernel.passes):
        if p.walks:
            _row_pass(file, scope, kernel, p, how, known, how.cached[position])
            known |= how.cached[position]
        _after(file, scope, p, "threadIdx.x == 0")
    block = f"dim3({how.threads}, {how.rows})" if how.rows > 1 else str(how.threads)
    return Launch(scope.lines, str(-(-steps // how.rows)), block, how.threads * how.rows)


def _share_out(file: CudaFile, kernel: LoopKernel) -> Rows:
    steps = count(kernel.row)
    width = 1
    if kernel.row:
        width = vector_width(file, kernel, kernel.row[-1], all_loads(kernel), all_stores(kernel))
    units = steps // width
    default = 32 if units <= 256 else 128 if units <= 1024 else 256 if units <= 4096 else 512
    if count(kernel.outer) < 264 and units > 1024:
        default = 1024
    threads = file.params.get("row_threads", default)
    chunks = -(-units // threads)
    how = Rows(threads, 4 if threads == 32 else 1, width, chunks)
    shared = shared_values(kernel)
    fits = chunks * width * max((len(s) for s in shared), default=0) <= MAX_CACHED
    if not file.params.get("cache_row", 1) or not any(shared) or not fits:
        how.chunks = 0
        shared = [[] for _ in kernel.passes]
    serial = 0
    for found in shared:
        names = {}
        for e in found:
            serial += 1
            names[e] = f"{e.attr[0] if e.op == 'load' else e.op}_kept{serial}"
        how.cached.append(names)
    return how


def _row_pass(
    file: CudaFile,
    scope: Scope,
    kernel: LoopKernel,
    p: Pass,
    how: Rows,
    known: dict[Expr, str],
    keep: dict[Expr, str],
) -> None:
    """One walk over the row; every thread of the row then gets the combined values."""
    row_invariants(scope, p, kernel.row)
    body = _row_access(file, scope, kernel, p, how, known)
    inner = body.child()
    inner.rename = {}
    inner.prepare(walked(p))
    for e, name in keep.items():
        inner.lines.append(f"{how.slot(name)} = {inner.text(e)};")
        inner.names[e] = how.slot(name)
    steps = count(kernel.row)
    parts = []
    for a in p.accumulate:
        lines, kind = declare(file, a, -(-steps // how.threads))
        scope.lines += lines
        combine(file, inner, a, part_name(a, kind), row_place(kernel.row))
        parts.append((a, part_name(a, kind)))
    _row_stores(file, body, inner, kernel, p, how)
    scope.lines += _walk_row(file, how, steps // how.width, body.lines)
    for a, part in parts:
        _row_combine(file, scope, a, part, how)


def _row_access(
    file: CudaFile, scope: Scope, kernel: LoopKernel, p: Pass, how: Rows, known: dict[Expr, str]
) -> Scope:
    """The body of a walk up to its vector loads; what earlier passes kept is not loaded again."""
    body = scope.child()
    for e, name in known.items():
        body.names[e] = how.slot(name)
    body.lines += unravel(file, "unit", kernel.row, how.width)
    if how.width > 1:
        last = kernel.row[-1]
        body.rename[last.name] = f"first_{last.name}"
        needed = [e for e in _needed(walked(p), known) if e.op == "load"]
        vector_loads(file, body, needed, last, how.width)
    return body


def _row_stores(
    file: CudaFile, body: Scope, inner: Scope, kernel: LoopKernel, p: Pass, how: Rows
) -> None:
    """Finish `inner` with the pass's stores and put it into `body`, before its vector stores."""
    wide = vector_stores(file, p.stores, kernel.row[-1], how.width) if how.width > 1 else []
    for s in p.stores:
        if s in wide:
            file.vectors = True
            body.lines.append(f"Vec<{file.pointer(s.buffer)}, {how.width}> {s.buffer}_out;")
            inner.lines.append(
                f"{s.buffer}_out.v[e] = {file.stored(s.buffer, inner.text(s.value))};"
            )
        else:
            inner.lines.append(store_line(file, inner, s))
    if how.width > 1:
        body.lines += elements(file, inner, kernel.row[-1], how.width)
    else:
        body.lines += inner.lines
    for s in wide:
        vec = f"Vec<{file.pointer(s.buffer)}, {how.width}>"
        body.lines.append(
            f"*reinterpret_cast<{vec}*>({s.buffer} + {body.index(s.index)}) = {s.buffer}_out;"
        )


def _row_combine(file: CudaFile, scope: Scope, a: Accumulate, part: str, how: Rows) -> None:
    """Combine the parts of a row's threads."""
    file.blocks.add(a.kind)
    call = f"block_{a.kind}<{how.threads}>"
    if a.kind.startswith("arg"):
        scope.lines.append(f"{a.name} = {call}({a.name}_best, {a.name}, scratch);")
    else:
        scope.lines.append(f"const {C_TYPE[a.type]} {a.name} = {call}({part}, scratch);")


def _needed(roots: list[Expr], known: dict[Expr, str]) -> list[Expr]:
    """What a pass computes itself, given the values it has kept."""
    found: list[Expr] = []

    def visit(e: Expr) -> None:
        if e in known or e in found:
            return
        found.append(e)
        for a in e.args:
            visit(a)

    for root in roots:
        visit(root)
    return found


def _walk_row(file: CudaFile, how: Rows, units: int, body: list[str]) -> list[str]:
    kind = file.int_type
    if not how.chunks:
        head = f"for ({kind} unit = threadIdx.x; unit < {units}; unit += {how.threads}) {{"
        return [head, *indent(body), "}"]
    even = units % how.threads == 0
    guarded = body if even else [f"if (unit < {units}) {{", *indent(body), "}"]
    return [
        "#pragma unroll",
        f"for (int c = 0; c < {how.chunks}; ++c) {{",
        *indent([f"const {kind} unit = c * {how.threads} + threadIdx.x;", *guarded]),
        "}",
    ]


def _after(file: CudaFile, scope: Scope, p: Pass, who: str) -> None:
    if not p.after:
        return
    inner = scope.child()
    inner.prepare(s.value for s in p.after)
    for s in p.after:
        inner.lines.append(store_line(file, inner, s))
    scope.lines += [f"if ({who}) {{", *indent(inner.lines), "}"]


def columns(file: CudaFile, kernel: LoopKernel) -> Launch:
    """Neighbouring threads take neighbouring columns; the threads of one column share its row and
    combine in shared memory."""
    *lead, column = kernel.outer
    wide = 32
    deep = file.params.get("column_threads", 8 if count(kernel.row) < 2048 else 16)
    blocks = -(-column.size // wide)
    kind = file.int_type
    scope = Scope(file.dialect())
    scope.lines += [
        *unravel(file, f"blockIdx.x / {blocks}" if lead else "0", lead),
        f"const {kind} {column.name} = blockIdx.x % {blocks} * {wide} + threadIdx.x;",
        f"const bool active = {column.name} < {column.size};",
        f"__shared__ double scratch[{deep} * {wide}];",
    ]
    for p in kernel.passes:
        if p.walks:
            _column_pass(file, scope, kernel, p, wide, deep)
        _after(file, scope, p, "active && threadIdx.y == 0")
    threads = wide * deep
    return Launch(scope.lines, str(blocks * count(lead)), f"dim3({wide}, {deep})", threads)


def _column_pass(
    file: CudaFile, scope: Scope, kernel: LoopKernel, p: Pass, wide: int, deep: int
) -> None:
    safe = scope.child()
    row_invariants(safe, p, kernel.row)
    steps = count(kernel.row)
    inner = scope.child()
    inner.prepare(walked(p))
    inner.lines += unravel(file, "unit", kernel.row)
    for a in p.accumulate:
        lines, kind = declare(file, a, -(-steps // deep))
        scope.lines += lines
        combine(file, inner, a, part_name(a, kind), row_place(kernel.row))
    for s in p.stores:
        inner.lines.append(store_line(file, inner, s))
    head = f"for ({file.int_type} unit = threadIdx.y; active && unit < {steps}; unit += {deep}) {{"
    scope.lines += [head, *indent(inner.lines), "}"]
    for a in p.accumulate:
        _column_combine(
            file,
            scope,
            a.name,
            a.kind,
            a.type,
            part_name(a, declare(file, a, -(-steps // deep))[1]),
            wide,
            deep,
        )


def _column_combine(
    file: CudaFile, scope: Scope, name: str, kind: str, type: str, part: str, wide: int, deep: int
) -> None:
    """Every thread of a column gets the combined value, in the order of the row's parts."""
    from kernel_agent.expert.cuda_helpers import COMBINE

    store = "double" if part.endswith("_total") else C_TYPE[type]
    if kind.startswith("arg"):
        raise NotImplementedError("argmax over columns is walked by one thread each")
    need = {"max": "nan_max", "min": "nan_min"}.get(kind)
    file.helpers |= {need} if need else set()
    scope.lines += [
        f"{store}* {name}_parts = reinterpret_cast<{store}*>(scratch);",
        "__syncthreads();",
        f"{name}_parts[threadIdx.y * {wide} + threadIdx.x] = {part};",
        "__syncthreads();",
        f"{store} {name}_all = {name}_parts[threadIdx.x];",
        f"for (int y = 1; y < {deep}; ++y) {{",
        f"    const {store} a = {name}_all, b = {name}_parts[y * {wide} + threadIdx.x];",
        f"    {name}_all = {COMBINE[kind]};",
        "}",
        f"const {C_TYPE[type]} {name} = {name}_all;",
    ]
