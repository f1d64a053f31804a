"""Kernels as CUDA C++. This file: the file, the launcher, pointwise kernels and
one-thread-per-output reductions.

Every launcher takes pointers and a stream, and returns the CUDA error of its launch (0: none).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from kernel_agent.expert.contraction import match
from kernel_agent.expert.cuda_helpers import preamble
from kernel_agent.expert.index import Index, Var
from kernel_agent.expert.ir import ITEMSIZE, Expr
from kernel_agent.expert.kernels import (
    Accumulate,
    Kernel,
    LoopKernel,
    ScanKernel,
    Store,
    reads,
    writes,
)
from kernel_agent.expert.lowering import numel
from kernel_agent.expert.params import Params
from kernel_agent.expert.plan import Plan
from kernel_agent.expert.print_cpp import parameters, row_invariants, start_value
from kernel_agent.expert.printer import C_TYPE, Dialect, Scope, indent, without_unused, wrapped

STORAGE = {
    "float32": "float",
    "bfloat16": "__nv_bfloat16",
    "float64": "double",
    "int64": "int64_t",
    "int32": "int32_t",
    "int16": "int16_t",
    "int8": "int8_t",
    "uint8": "uint8_t",
    "bool": "bool",
}
PLAIN_DTYPES = ("float32", "float64", "int64", "bool")
FEW = 64  # a row this short is walked by one thread
LONG = 4096  # a float sum longer than this per thread is kept in double


@dataclass
class CudaFile:
    """One .cu file being written."""

    plan: Plan
    params: Params
    helpers: set[str] = field(default_factory=set)
    functions: set[str] = field(default_factory=set)
    blocks: set[str] = field(default_factory=set)
    extra: list[str] = field(default_factory=list)
    vectors: bool = False

    @property
    def int_type(self) -> str:
        small = all(numel(v.shape) < 2**31 - 2**20 for v in self.plan.buffers.values())
        return "int" if small else "int64_t"

    def element(self, buffer: str, text: str) -> str:
        """The text of a stored element, in its expression type."""
        dtype = self.plan.buffers[buffer].dtype
        if dtype == "bfloat16":
            return f"__bfloat162float({text})"
        return text if dtype in PLAIN_DTYPES else f"(int64_t){text}"

    def stored(self, buffer: str, text: str) -> str:
        dtype = self.plan.buffers[buffer].dtype
        if dtype == "bfloat16":
            return f"__float2bfloat16({text})"
        return text if dtype in PLAIN_DTYPES else f"({STORAGE[dtype]})({text})"

    def dialect(self) -> Dialect:
        def load(buffer: str, index: str) -> str:
            return self.element(buffer, f"{buffer}[{index}]")

        return Dialect(
            load,
            lambda name: name,
            self.int_type,
            rsqrt=True,
            helpers=self.helpers,
            functions=self.functions,
        )

    def pointer(self, buffer: str) -> str:
        return STORAGE[self.plan.buffers[buffer].dtype]


@dataclass
class Launch:
    """A device function body, and the grid it is launched on."""

    body: list[str]
    grid: str
    block: str
    threads: int


def print_cuda(plan: Plan, params: Params) -> str:
    """The text of kernels/kernels.cu."""
    from kernel_agent.expert.print_cuda_rows import columns, rows
    from kernel_agent.expert.print_cuda_scan import scan
    from kernel_agent.expert.print_cuda_thread import one_thread_each
    from kernel_agent.expert.print_cuda_tiles import contraction

    file = CudaFile(plan, params)
    bodies: list[str] = []
    for kernel in plan.kernels:
        product = (
            match(kernel) if plan.kind == "optimized" and isinstance(kernel, LoopKernel) else None
        )
        if isinstance(kernel, ScanKernel):
            launch = scan(file, kernel)
        elif product is not None:
            launch = contraction(file, product)
        elif kernel.layout == "pointwise":
            launch = pointwise(file, kernel)
        elif _one_thread_each(kernel):
            launch = one_thread_each(file, kernel)
        else:
            launch = rows(file, kernel) if kernel.layout == "row" else columns(file, kernel)
        bodies += [*_function(file, kernel, launch), ""]
    used = {b for k in plan.kernels for b in (*reads(k), *writes(k))}
    bf16 = any(plan.buffers[b].dtype == "bfloat16" for b in used)
    lines = preamble(file.helpers, file.blocks, bf16, file.vectors, file.extra)
    return "\n".join([*lines, *bodies]).rstrip() + "\n"


def _function(file: CudaFile, kernel: Kernel, launch: Launch) -> list[str]:
    buffers = file.plan.buffers
    device = parameters(kernel, buffers, STORAGE, "__restrict__")[:-1]
    device[-1] = device[-1].rstrip(",")
    names = ", ".join([*reads(kernel), *writes(kernel)])
    return [
        *(f"// {text}" for text in kernel.comment),
        f"__global__ void __launch_bounds__({launch.threads}) {kernel.name}_device(",
        *indent(device),
        ") {",
        *indent(without_unused(launch.body)),
        "}",
        "",
        f'extern "C" int {kernel.name}(',
        *indent(parameters(kernel, buffers, STORAGE, "")),
        ") {",
        f"    {kernel.name}_device<<<{launch.grid}, {launch.block}, 0, "
        f"(cudaStream_t)stream>>>({names});",
        "    return launched();",
        "}",
    ]


def suffix(file: CudaFile) -> str:
    return "" if file.int_type == "int" else "LL"


def count(loops: Sequence[Var]) -> int:
    total = 1
    for v in loops:
        total *= v.size
    return total


def unravel(file: CudaFile, step: str, loops: Sequence[Var], last_factor: int = 1) -> list[str]:
    """Loop variables from a running number; the last loop advances by `last_factor`."""
    lines: list[str] = []
    below = 1
    for position in range(len(loops) - 1, -1, -1):
        v = loops[position]
        factor = last_factor if position == len(loops) - 1 else 1
        size = v.size // factor
        text = step if below == 1 else f"{step} / {below}"
        if position > 0:
            text = f"{text} % {size}"
        name = v.name if factor == 1 else f"first_{v.name}"
        lines.append(
            f"const {file.int_type} {name} = "
            f"{text if factor == 1 else f'{wrapped(text)} * {factor}'};"
        )
        below *= size
    return lines[::-1]


def store_line(file: CudaFile, scope: Scope, s: Store) -> str:
    return f"{s.buffer}[{scope.index(s.index)}] = {file.stored(s.buffer, scope.text(s.value))};"


def contiguous_along(index: Index, v: Var, width: int) -> bool:
    """Whether `width` neighbouring values of v address neighbouring, aligned elements (v a
    multiple of width)."""
    if index.coefficient(v) != 1 or index.const % width:
        return False
    rest = [(atom, c) for atom, c in index.terms if atom != v]
    return all(
        c % width == 0 and (isinstance(atom, Var) or v not in Index(((atom, 1),), 0).variables)
        for atom, c in rest
    )


def vector_width(
    file: CudaFile, kernel: LoopKernel, v: Var, loads: Sequence[Expr], stores: Sequence[Store]
) -> int:
    """Elements per access along v: 16 bytes of the narrowest buffer, when the sizes allow it."""
    along = [e.attr[0] for e in loads if e.attr[1].coefficient(v) == 1]
    along += [s.buffer for s in stores if s.index.coefficient(v) == 1]
    if not along:
        return 1
    width = file.params.get(
        "vector", 16 // min(max(ITEMSIZE[file.plan.buffers[b].dtype], 2) for b in along)
    )
    while width > 1 and v.size % width:
        width //= 2
    useful = any(contiguous_along(e.attr[1], v, width) and not e.attr[2] for e in loads)
    useful |= any(contiguous_along(s.index, v, width) for s in stores)
    return width if useful else 1


def vector_loads(
    file: CudaFile, scope: Scope, loads: Sequence[Expr], v: Var, width: int
) -> list[Expr]:
    """Emit 16-byte loads for what is contiguous along v, and name their elements [e]. Returns
    those loads."""
    done = []
    for e in loads:
        buffer, index, bounds, _ = e.attr
        if e in scope.names or bounds or not contiguous_along(index, v, width):
            continue
        if any(
            not isinstance(atom, Var) and v in Index(((atom, 1),), 0).variables
            for atom, _ in index.terms
        ):
            continue
        file.vectors = True
        scope.counter[0] += 1
        name = f"{buffer}_vec{scope.counter[0]}"
        vec = f"Vec<{file.pointer(buffer)}, {width}>"
        scope.lines.append(
            f"const {vec} {name} = "
            f"*reinterpret_cast<const {vec}*>({buffer} + {scope.index(index)});"
        )
        scope.names[e] = file.element(buffer, f"{name}.v[e]")
        done.append(e)
    return done


def vector_stores(file: CudaFile, stores: Sequence[Store], v: Var, width: int) -> list[Store]:
    return [s for s in stores if contiguous_along(s.index, v, width)]


def pointwise(file: CudaFile, kernel: LoopKernel) -> Launch:
    """One thread per `width` neighbouring elements of the last loop."""
    from kernel_agent.expert.kernels import loads as all_loads

    threads = file.params.get("threads", 256)
    all_stores = [s for p in kernel.passes for s in (*p.stores, *p.after)]
    if not kernel.outer:
        scope = Scope(file.dialect())
        scope.prepare(s.value for s in all_stores)
        for s in all_stores:
            scope.lines.append(store_line(file, scope, s))
        return Launch(scope.lines, "1", "1", 1)
    last = kernel.outer[-1]
    found = all_loads(kernel)
    width = vector_width(file, kernel, last, found, all_stores)
    steps = count(kernel.outer) // width
    scope = Scope(file.dialect())
    scope.lines += [
        f"const {file.int_type} step = blockIdx.x * {threads}{suffix(file)} + threadIdx.x;",
        f"if (step >= {steps}) return;",
        *unravel(file, "step", kernel.outer, width),
    ]
    if width == 1:
        scope.prepare(s.value for s in all_stores)
        for s in all_stores:
            scope.lines.append(store_line(file, scope, s))
    else:
        _pointwise_vector(file, scope, kernel, all_stores, found, width)
    return Launch(scope.lines, str(-(-steps // threads)), str(threads), threads)


def _pointwise_vector(
    file: CudaFile,
    scope: Scope,
    kernel: LoopKernel,
    all_stores: list[Store],
    found: list[Expr],
    width: int,
) -> None:
    from kernel_agent.expert.kernels import Pass

    last = kernel.outer[-1]
    scope.rename[last.name] = f"first_{last.name}"
    vector_loads(file, scope, found, last, width)
    row_invariants(scope, Pass(stores=all_stores), [last])
    wide = vector_stores(file, all_stores, last, width)
    for s in wide:
        file.vectors = True
        scope.lines.append(f"Vec<{file.pointer(s.buffer)}, {width}> {s.buffer}_out;")
    inner = scope.child()
    inner.prepare(s.value for s in all_stores)
    for s in all_stores:
        if s in wide:
            inner.lines.append(
                f"{s.buffer}_out.v[e] = {file.stored(s.buffer, inner.text(s.value))};"
            )
        else:
            inner.lines.append(store_line(file, inner, s))
    scope.lines += elements(file, inner, last, width)
    for s in wide:
        vec = f"Vec<{file.pointer(s.buffer)}, {width}>"
        scope.lines.append(
            f"*reinterpret_cast<{vec}*>({s.buffer} + {scope.index(s.index)}) = {s.buffer}_out;"
        )


def elements(file: CudaFile, inner: Scope, v: Var, width: int) -> list[str]:
    """The loop over the elements of a vector whose first element is first_<v>; `inner` holds its
    body."""
    body = inner.lines
    if any(re.search(rf"\b{v.name}\b", line) for line in body):
        body = [f"const {file.int_type} {v.name} = first_{v.name} + e;", *body]
    return ["#pragma unroll", f"for (int e = 0; e < {width}; ++e) {{", *indent(body), "}"]


def _one_thread_each(kernel: LoopKernel) -> bool:
    """Short rows, or rows nobody else shares a walk with: one thread per outer step."""
    if len([p for p in kernel.passes if p.walks]) > 1:
        return False
    if kernel.layout == "column" and any(
        a.kind.startswith("arg") for p in kernel.passes for a in p.accumulate
    ):
        return True
    steps = count(kernel.row)
    return steps <= FEW or (kernel.layout == "column" and count(kernel.outer) >= 2**17)


def declare(file: CudaFile, a: Accumulate, length: int) -> tuple[list[str], str]:
    """Declarations of a thread's part of a reduction, and the type it is kept in."""
    kind = C_TYPE[a.type]
    if a.kind.startswith("arg"):
        sign = "-" if a.kind == "argmax" else ""
        low = f"{sign}INFINITY" if a.value.type != "int" else ("INT64_MIN" if sign else "INT64_MAX")
        lines = [f"{C_TYPE[a.value.type]} {a.name}_best = {low};", f"int64_t {a.name} = INT64_MAX;"]
        return lines, kind
    if a.kind == "sum" and kind == "float" and length > LONG:
        return [f"double {a.name}_total = 0.0;"], "double"
    return [f"{kind} {a.name}_part = {start_value(a, a.type)};"], kind


def part_name(a: Accumulate, kind: str) -> str:
    return f"{a.name}_total" if kind == "double" and a.type == "float" else f"{a.name}_part"


def combine(file: CudaFile, scope: Scope, a: Accumulate, into: str, place: str) -> None:
    """Add one element to a thread's part."""
    value = scope.text(a.value)
    if a.kind.startswith("arg"):
        sign = ">" if a.kind == "argmax" else "<"
        v = scope.names.get(a.value) or scope.named(a.value, value)
        best = f"{a.name}_best"
        scope.lines += [
            f"if ({v} {sign} {best} || ({v} != {v} && {best} == {best}) "
            f"|| {a.name} == INT64_MAX) {{",
            f"    {best} = {v};",
            f"    {a.name} = {place};",
            "}",
        ]
    elif a.kind in ("max", "min"):
        file.helpers.add(f"nan_{a.kind}")
        scope.lines.append(f"{into} = nan_{a.kind}({into}, {value});")
    else:
        sign = {"sum": "+=", "prod": "*=", "any": "|=", "all": "&="}[a.kind]
        scope.lines.append(f"{into} {sign} {value};")


def row_place(row: Sequence[Var]) -> str:
    """The position in the row, as an argmax reports it."""
    text = row[0].name if row else "0"
    for v in row[1:]:
        text = f"({text}) * {v.size} + {v.name}"
    return text
