"""CUDA for short rows: one thread walks each."""

from __future__ import annotations

from kernel_agent.expert.kernels import LoopKernel
from kernel_agent.expert.print_cpp import row_invariants
from kernel_agent.expert.print_cuda import (
    CudaFile,
    Launch,
    combine,
    count,
    declare,
    part_name,
    row_place,
    store_line,
    suffix,
    unravel,
)
from kernel_agent.expert.printer import C_TYPE, Scope, indent


def one_thread_each(file: CudaFile, kernel: LoopKernel) -> Launch:
    """Each thread walks its own row; neighbouring threads take neighbouring outer steps."""
    threads = file.params.get("threads", 256)
    steps = count(kernel.outer)
    scope = Scope(file.dialect())
    scope.lines += [
        f"const {file.int_type} step = blockIdx.x * {threads}{suffix(file)} + threadIdx.x;",
        f"if (step >= {steps}) return;",
        *unravel(file, "step", kernel.outer),
    ]
    for p in kernel.passes:
        if p.walks:
            row_invariants(scope, p, kernel.row)
        inner = scope.child()
        inner.prepare([*(a.value for a in p.accumulate), *(s.value for s in p.stores)])
        after: list[str] = []
        for a in p.accumulate:
            lines, kind = declare(file, a, count(kernel.row))
            scope.lines += lines
            combine(file, inner, a, part_name(a, kind), row_place(kernel.row))
            if not a.kind.startswith("arg"):
                after.append(f"const {C_TYPE[a.type]} {a.name} = {part_name(a, kind)};")
        for s in p.stores:
            inner.lines.append(store_line(file, inner, s))
        body = inner.lines
        for v in reversed(kernel.row):
            head = f"for ({file.int_type} {v.name} = 0; {v.name} < {v.size}; ++{v.name}) {{"
            body = [head, *indent(body), "}"]
        scope.lines += body + after
        scope.uses.clear()
        scope.prepare(s.value for s in p.after)
        for s in p.after:
            scope.lines.append(store_line(file, scope, s))
    return Launch(scope.lines, str(-(-steps // threads)), str(threads), threads)
