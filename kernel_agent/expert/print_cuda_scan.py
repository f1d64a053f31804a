# ruff: noqa: E501 - C text reads better whole
"""CUDA for scans: a block walks a contiguous line in chunks; otherwise one thread walks each
line."""

from __future__ import annotations

from kernel_agent.expert.kernels import ScanKernel
from kernel_agent.expert.print_cuda import CudaFile, Launch, count, store_line, suffix, unravel
from kernel_agent.expert.printer import C_TYPE, Scope, indent

START = {"sum": "0", "prod": "1", "max": "-INFINITY", "min": "INFINITY", "logaddexp": "-INFINITY"}

SCAN = """// Inclusive scan of one value per thread over a block of THREADS; `all` becomes the combine of all of them.
template <int THREADS, typename T> __device__ __forceinline__ T block_scan_{kind}(T value, T& all, T* scratch) {{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    auto combined = [](T a, T b) {{ return {combine}; }};
    for (int step = 1; step < 32; step *= 2) {{
        const T before = __shfl_up_sync(0xffffffff, value, step);
        if (lane >= step) value = combined(before, value);
    }}
    __syncthreads();
    if (lane == 31) scratch[warp] = value;
    __syncthreads();
    T before = scratch[0];
    for (int w = 1; w < warp; ++w) before = combined(before, scratch[w]);
    all = scratch[0];
    for (int w = 1; w < THREADS / 32; ++w) all = combined(all, scratch[w]);
    return warp > 0 ? combined(before, value) : value;
}}"""


def scan(file: CudaFile, kernel: ScanKernel) -> Launch:
    if kernel.contiguous and kernel.dim.size >= 64:
        return _block_scan(file, kernel)
    return _thread_scan(file, kernel)


def _types(kernel: ScanKernel) -> tuple[str, str, str]:
    """The value's type, the running type, the value a scan starts from."""
    kind = C_TYPE[kernel.value.type]
    start = START[kernel.kind]
    if kind == "int64_t":
        start = {"max": "INT64_MIN", "min": "INT64_MAX"}.get(kernel.kind, start)
    wide = "double" if kind == "float" and kernel.kind in ("sum", "prod") else kind
    return kind, wide, start


def _step(file: CudaFile, kernel: ScanKernel, a: str, b: str) -> str:
    if kernel.kind in ("sum", "prod"):
        return f"{a} {'+' if kernel.kind == 'sum' else '*'} {b}"
    if kernel.kind == "logaddexp":
        file.helpers |= {"log_add_exp", "nan_max"}
        return f"log_add_exp({a}, {b})"
    file.helpers.add(f"nan_{kernel.kind}")
    return f"nan_{kernel.kind}({a}, {b})"


def _thread_scan(file: CudaFile, kernel: ScanKernel) -> Launch:
    """Each thread walks one line; neighbouring threads take neighbouring lines."""
    threads = file.params.get("threads", 128)
    steps = count(kernel.outer)
    kind, wide, start = _types(kernel)
    scope = Scope(file.dialect())
    scope.lines += [
        f"const {file.int_type} step = blockIdx.x * {threads}{suffix(file)} + threadIdx.x;",
        f"if (step >= {steps}) return;",
        *unravel(file, "step", kernel.outer),
        f"{wide} running = {start};",
    ]
    inner = scope.child()
    inner.prepare([kernel.value])
    inner.lines.append(f"running = {_step(file, kernel, 'running', inner.text(kernel.value))};")
    _write(file, inner, kernel, f"({kind})running" if wide != kind else "running")
    head = f"for ({file.int_type} {kernel.dim.name} = 0; {kernel.dim.name} < {kernel.dim.size}; ++{kernel.dim.name}) {{"
    scope.lines += [head, *indent(inner.lines), "}"]
    return Launch(scope.lines, str(-(-steps // threads)), str(threads), threads)


def _write(file: CudaFile, scope: Scope, kernel: ScanKernel, running: str) -> None:
    scope.dialect.local = lambda name: running
    scope.uses.clear()
    scope.prepare(s.value for s in kernel.stores)
    for s in kernel.stores:
        scope.lines.append(store_line(file, scope, s))


def _block_scan(file: CudaFile, kernel: ScanKernel) -> Launch:
    """One block per line. A chunk is scanned by its threads together; `carry` takes the total to
    the next chunk."""
    n = kernel.dim.size
    threads = file.params.get("scan_threads", 128 if n <= 1024 else 256)
    each = file.params.get("scan_each", 4)
    _, wide, start = _types(kernel)
    text = SCAN.format(kind=kernel.kind, combine=_step(file, kernel, "a", "b"))
    if text not in file.extra:
        file.extra += [text, ""]
    scope = Scope(file.dialect())
    chunk = [
        *_own_part(file, scope, kernel, threads, each),
        *_lead(file, kernel, threads, each),
        *_store_part(file, scope, kernel, threads, each),
        f"carry = {_step(file, kernel, 'carry', 'chunk')};",
    ]
    scope.lines += [
        *unravel(file, "blockIdx.x", kernel.outer),
        f"__shared__ {wide} scratch[32];",
        f"{wide} carry = {start};",
        f"for ({file.int_type} begin = 0; begin < {n}; begin += {threads * each}) {{",
        *indent(chunk),
        "}",
    ]
    return Launch(scope.lines, str(count(kernel.outer)), str(threads), threads)


def _own_part(
    file: CudaFile, scope: Scope, kernel: ScanKernel, threads: int, each: int
) -> list[str]:
    """Each thread loads `each` neighbouring elements and scans them on its own."""
    _, wide, start = _types(kernel)
    load = scope.child()
    load.prepare([kernel.value])
    load.lines.append(f"part[e] = {load.text(kernel.value)};")
    element = [
        f"part[e] = {start};",
        _position(file, kernel, each),
        *_within_line(kernel, threads * each, load.lines),
    ]
    return [
        f"{wide} part[{each}];",
        "#pragma unroll",
        f"for (int e = 0; e < {each}; ++e) {{",
        *indent(element),
        f"    if (e > 0) part[e] = {_step(file, kernel, 'part[e - 1]', 'part[e]')};",
        "}",
    ]


def _lead(file: CudaFile, kernel: ScanKernel, threads: int, each: int) -> list[str]:
    """`lead` is all that precedes a thread's part, `chunk` the combine of the whole chunk."""
    _, wide, _ = _types(kernel)
    return [
        f"{wide} chunk;",
        f"{wide} before = block_scan_{kernel.kind}<{threads}>(part[{each - 1}], chunk, scratch);",
        "// What precedes this thread: its neighbour's inclusive value.",
        f"{wide} previous = __shfl_up_sync(0xffffffff, before, 1);",
        f"__shared__ {wide} edge[32];",
        "if (threadIdx.x % 32 == 31) edge[threadIdx.x / 32] = before;",
        "__syncthreads();",
        "if (threadIdx.x % 32 == 0 && threadIdx.x > 0) previous = edge[threadIdx.x / 32 - 1];",
        f"const {wide} lead = threadIdx.x > 0 ? {_step(file, kernel, 'carry', 'previous')} : carry;",
    ]


def _store_part(
    file: CudaFile, scope: Scope, kernel: ScanKernel, threads: int, each: int
) -> list[str]:
    """Each thread stores its part, now with what precedes it."""
    kind, wide, _ = _types(kernel)
    running = "sum_to_here"
    store = scope.child()
    _write(file, store, kernel, f"({kind}){running}" if wide != kind else running)
    element = [
        _position(file, kernel, each),
        f"const {wide} {running} = {_step(file, kernel, 'lead', 'part[e]')};",
        *_within_line(kernel, threads * each, store.lines),
    ]
    return ["#pragma unroll", f"for (int e = 0; e < {each}; ++e) {{", *indent(element), "}"]


def _position(file: CudaFile, kernel: ScanKernel, each: int) -> str:
    return f"const {file.int_type} {kernel.dim.name} = begin + threadIdx.x * {each} + e;"


def _within_line(kernel: ScanKernel, chunk: int, body: list[str]) -> list[str]:
    """`body` as a block, guarded when the last chunk reaches over the line's end."""
    n = kernel.dim.size
    head = f"if ({kernel.dim.name} < {n}) {{" if n % chunk else "{"
    return [head, *indent(body), "}"]
