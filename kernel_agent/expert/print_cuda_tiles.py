# ruff: noqa: E501 - C text reads better whole
"""CUDA for contractions: tiles of both factors in shared memory, a block of results per thread or
per warp.

fp32 multiplies in fp32. bfloat16 factors go to the tensor cores and are summed in fp32. TF32 only
where the caller asks for it (the option `tf32`), which belongs to problems of that class.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernel_agent.expert.contraction import Contraction
from kernel_agent.expert.index import Var
from kernel_agent.expert.ir import Expr, walk
from kernel_agent.expert.print_cuda import CudaFile, Launch, count, store_line, unravel
from kernel_agent.expert.printer import Scope, indent

THREADS = 256
EXACT = 256  # products summed in one float before they join the total


@dataclass(frozen=True)
class Tile:
    rows: int
    columns: int
    depth: int
    tensor: str  # "" (fp32 units) | bf16 | tf32

    @property
    def fragment(self) -> tuple[int, str]:
        """Depth and element type of what a tensor core multiplies at once."""
        return (16, "__nv_bfloat16") if self.tensor == "bf16" else (8, "wmma::precision::tf32")

    @property
    def warp_blocks(self) -> tuple[int, int]:
        """The blocks of 16 x 16 sums of each of 4 x 2 warps."""
        return self.rows // 4 // 16, self.columns // 2 // 16


def contraction(file: CudaFile, c: Contraction) -> Launch:
    tile = _tile(file, c)
    row_tiles, column_tiles = -(-count(c.rows) // tile.rows), -(-count(c.columns) // tile.columns)
    scope = Scope(file.dialect())
    kind = file.int_type
    batch_at = f"blockIdx.x / {row_tiles * column_tiles}"
    scope.lines += [
        f"const {kind} row_start = blockIdx.x / {column_tiles} % {row_tiles} * {tile.rows};",
        f"const {kind} column_start = blockIdx.x % {column_tiles} * {tile.columns};",
        *unravel(file, batch_at, c.batch),
    ]
    pad, element = (8, "__nv_bfloat16") if tile.tensor == "bf16" else (4, "float")
    scope.lines += [
        f"__shared__ __align__(32) {element} left[{tile.depth}][{tile.rows + pad}];",
        f"__shared__ __align__(32) {element} right[{tile.depth}][{tile.columns + pad}];",
    ]
    steps = [
        "__syncthreads();  // everybody is done with the previous tiles",
        *_load(file, scope, "left", c.left, c.rows, "row", tile.rows, c.depth, tile),
        *_load(file, scope, "right", c.right, c.columns, "column", tile.columns, c.depth, tile),
        "__syncthreads();",
    ]
    if tile.tensor:
        before, multiply, after = _tensor(file, scope, c, tile, pad)
    else:
        before, multiply, after = _plain(file, scope, c, tile)
    depth = count(c.depth)
    scope.lines += [
        *before,
        f"for ({kind} depth_start = 0; depth_start < {depth}; depth_start += {tile.depth}) {{",
        *indent([*steps, *multiply]),
        "}",
        *after,
    ]
    return Launch(
        scope.lines, str(row_tiles * column_tiles * count(c.batch)), str(THREADS), THREADS
    )


def _tile(file: CudaFile, c: Contraction) -> Tile:
    tensor = ""
    if all(_is_bf16(file, e) for e in (c.left, c.right)):
        tensor = "bf16"
    elif file.params.get("tf32", 0):
        tensor = "tf32"
    large = count(c.rows) * count(c.columns) * count(c.batch) >= 132 * 128 * 128
    default = 128 if large and count(c.rows) > 64 and count(c.columns) > 64 else 64
    side = file.params.get("tile", default)
    return Tile(side, side, 32 if tensor else 16, tensor)


def _is_bf16(file: CudaFile, e: Expr) -> bool:
    return e.op == "load" and file.plan.buffers[e.attr[0]].dtype == "bfloat16"


def _load(
    file: CudaFile,
    scope: Scope,
    name: str,
    value: Expr,
    sides: tuple[Var, ...],
    word: str,
    size: int,
    depth: tuple[Var, ...],
    tile: Tile,
) -> list[str]:
    """Fill one tile; neighbouring threads take neighbouring addresses."""
    inner = scope.child()
    text = _as_element(inner.text(value), tile)
    fill = [
        *unravel(file, word, sides),
        *unravel(file, "at", depth),
        *inner.lines,
        f"{name}[depth][side] = {text};",
    ]
    checks = [f"{word} < {count(sides)}"] if count(sides) % size else []
    checks += [f"at < {count(depth)}"] if count(depth) % tile.depth else []
    if checks:
        zero = "__float2bfloat16(0.0f)" if tile.tensor == "bf16" else "0.0f"
        inside = [f"if ({' && '.join(checks)}) {{", *indent(fill), "}"]
        fill = [f"{name}[depth][side] = {zero};", *inside]
    if _along_depth(value, sides, depth):
        place = f"const int depth = slot % {tile.depth}, side = slot / {tile.depth};"
    else:
        place = f"const int side = slot % {size}, depth = slot / {size};"
    at = f"const {file.int_type} {word} = {word}_start + side, at = depth_start + depth;"
    return [
        "#pragma unroll",
        f"for (int slot = threadIdx.x; slot < {size * tile.depth}; slot += {THREADS}) {{",
        *indent([place, at, *fill]),
        "}",
    ]


def _as_element(text: str, tile: Tile) -> str:
    """A float as an element of the tile."""
    if tile.tensor == "bf16":
        return f"__float2bfloat16({text})"
    return f"nvcuda::wmma::__float_to_tf32({text})" if tile.tensor == "tf32" else text


def _along_depth(value: Expr, sides: tuple[Var, ...], depth: tuple[Var, ...]) -> bool:
    """Whether neighbouring addresses of a factor lie along the depth."""
    index = next((e.attr[1] for e in walk([value]) if e.op == "load"), None)
    return (
        index is not None
        and index.coefficient(depth[-1]) == 1
        and index.coefficient(sides[-1]) != 1
    )


def _plain(
    file: CudaFile, scope: Scope, c: Contraction, tile: Tile
) -> tuple[list[str], list[str], list[str]]:
    """16 x 16 threads, each with a block of sums in registers."""
    high, wide = tile.rows // 16, tile.columns // 16
    long = count(c.depth) > EXACT
    before = [f"float totals[{high}][{wide}] = {{}};"] if long else []
    before += [
        f"float sums[{high}][{wide}] = {{}};",
        "const int thread_x = threadIdx.x % 16, thread_y = threadIdx.x / 16;",
    ]
    multiply = [
        "#pragma unroll",
        f"for (int depth = 0; depth < {tile.depth}; ++depth) {{",
        f"    __align__(16) float a[{high}], b[{wide}];",
        *_fragments("a", "left", "thread_y", high),
        *_fragments("b", "right", "thread_x", wide),
        "    #pragma unroll",
        f"    for (int mi = 0; mi < {high}; ++mi) {{",
        "        #pragma unroll",
        f"        for (int ni = 0; ni < {wide}; ++ni) sums[mi][ni] += a[mi] * b[ni];",
        "    }",
        "}",
    ]
    if long:
        flush = _each_sum(high, wide, "totals[mi][ni] += sums[mi][ni];", "sums[mi][ni] = 0.0f;")
        last = f"depth_start + {tile.depth} >= {count(c.depth)}"
        multiply += [
            f"// Sums of at most {EXACT} products each are added up: less rounding than one long sum.",
            f"if ((depth_start + {tile.depth}) % {EXACT} == 0 || {last}) {{",
            *indent(flush),
            "}",
        ]
    kind = file.int_type
    result = "totals[mi][ni]" if long else "sums[mi][ni]"
    body = [
        f"const {kind} row = row_start + mi / 4 * 64 + thread_y * 4 + mi % 4;",
        f"const {kind} column = column_start + ni / 4 * 64 + thread_x * 4 + ni % 4;",
        *_epilogue(file, scope, c, result, tile),
    ]
    return before, multiply, _each_sum(high, wide, *body)


def _each_sum(high: int, wide: int, *body: str) -> list[str]:
    """`body` for each of a thread's or warp's sums."""
    return [
        "#pragma unroll",
        f"for (int mi = 0; mi < {high}; ++mi) {{",
        "    #pragma unroll",
        f"    for (int ni = 0; ni < {wide}; ++ni) {{",
        *indent(body, 2),
        "    }",
        "}",
    ]


def _fragments(name: str, tile: str, lane: str, size: int) -> list[str]:
    """Groups of 4 neighbouring elements, 64 apart: each is one 16-byte read, without bank
    conflicts."""
    return [
        "    #pragma unroll",
        f"    for (int g = 0; g < {size // 4}; ++g) {{",
        f"        *reinterpret_cast<float4*>(&{name}[g * 4]) = "
        f"*reinterpret_cast<const float4*>(&{tile}[depth][g * 64 + {lane} * 4]);",
        "    }",
    ]


def _tensor(
    file: CudaFile, scope: Scope, c: Contraction, tile: Tile, pad: int
) -> tuple[list[str], list[str], list[str]]:
    """8 warps as 4 x 2; each multiplies blocks of 16 x 16 on the tensor cores, summing in fp32."""
    include = "#include <mma.h>"
    if include not in file.extra:
        file.extra.append(include)
    high, wide = tile.warp_blocks
    deep, _ = tile.fragment
    before = [
        "namespace wmma = nvcuda::wmma;",
        "const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;",
        f"const int warp_row = warp / 2 * {tile.rows // 4}, warp_column = warp % 2 * {tile.columns // 2};",
        f"wmma::fragment<wmma::accumulator, 16, 16, {deep}, float> sums[{high}][{wide}];",
        f"for (int mi = 0; mi < {high}; ++mi)",
        f"    for (int ni = 0; ni < {wide}; ++ni) wmma::fill_fragment(sums[mi][ni], 0.0f);",
    ]
    return before, _tensor_multiply(tile, pad), _tensor_results(file, scope, c, tile)


def _tensor_multiply(tile: Tile, pad: int) -> list[str]:
    """Add the product of the two tiles in shared memory to the sums."""
    high, wide = tile.warp_blocks
    deep, element = tile.fragment
    shape = f"16, 16, {deep}, {element}"
    return [
        "#pragma unroll",
        f"for (int depth = 0; depth < {tile.depth}; depth += {deep}) {{",
        f"    wmma::fragment<wmma::matrix_a, {shape}, wmma::col_major> a[{high}];",
        f"    wmma::fragment<wmma::matrix_b, {shape}, wmma::row_major> b[{wide}];",
        "    #pragma unroll",
        f"    for (int mi = 0; mi < {high}; ++mi) wmma::load_matrix_sync(a[mi], &left[depth][warp_row + mi * 16], {tile.rows + pad});",
        "    #pragma unroll",
        f"    for (int ni = 0; ni < {wide}; ++ni) wmma::load_matrix_sync(b[ni], &right[depth][warp_column + ni * 16], {tile.columns + pad});",
        "    #pragma unroll",
        f"    for (int mi = 0; mi < {high}; ++mi) {{",
        "        #pragma unroll",
        f"        for (int ni = 0; ni < {wide}; ++ni) wmma::mma_sync(sums[mi][ni], a[mi], b[ni], sums[mi][ni]);",
        "    }",
        "}",
    ]


def _tensor_results(file: CudaFile, scope: Scope, c: Contraction, tile: Tile) -> list[str]:
    """A block of sums at a time goes through shared memory to the threads that store it."""
    kind = file.int_type
    body = [
        f"const {kind} row = row_start + warp_row + mi * 16 + e / 16;",
        f"const {kind} column = column_start + warp_column + ni * 16 + e % 16;",
        *_epilogue(file, scope, c, "patch[warp][e / 16][e % 16]", tile),
    ]
    block = [
        "wmma::store_matrix_sync(&patch[warp][0][0], sums[mi][ni], 16, wmma::mem_row_major);",
        "__syncwarp();",
        "for (int e = lane; e < 256; e += 32) {",
        *indent(body),
        "}",
        "__syncwarp();",
    ]
    return [
        "// A block of sums at a time goes through shared memory, where its layout is known.",
        "__shared__ __align__(32) float patch[8][16][16];",
        *_each_sum(*tile.warp_blocks, *block),
    ]


def _epilogue(file: CudaFile, scope: Scope, c: Contraction, total: str, tile: Tile) -> list[str]:
    """What is computed from one finished sum, and stored."""
    inner = scope.child()
    inner.lines += [*unravel(file, "row", c.rows), *unravel(file, "column", c.columns)]
    inner.lines.append(f"const float {c.total.name} = {total};")
    inner.prepare(s.value for s in c.stores)
    for s in c.stores:
        inner.lines.append(store_line(file, inner, s))
    checks = [f"row < {count(c.rows)}"] if count(c.rows) % tile.rows else []
    checks += [f"column < {count(c.columns)}"] if count(c.columns) % tile.columns else []
    return [f"if ({' && '.join(checks)}) {{", *indent(inner.lines), "}"] if checks else inner.lines
