# ruff: noqa: E501 - C text reads better whole
"""What stands at the top of a generated CUDA file: includes, 16-byte vectors, block-wide combines,
small helpers."""

from __future__ import annotations

from kernel_agent.expert.printer import HELPERS, helper_text

VEC = """// N neighbouring elements, moved with one load or store.
template <typename T, int N> struct alignas(sizeof(T) * N) Vec {
    T v[N];
};"""

COMBINE = {
    "sum": "a + b",
    "prod": "a * b",
    "max": "nan_max(a, b)",
    "min": "nan_min(a, b)",
    "any": "a || b",
    "all": "a && b",
    "logaddexp": "log_add_exp(a, b)",
}

ARG = """// The position of the {word} value over the block; the first one on ties, NaN before numbers.
template <int THREADS, typename T> __device__ __forceinline__ int64_t block_{kind}(T value, int64_t at, void* scratch) {{
    auto better = [](T a, int64_t i, T b, int64_t j) {{
        if ((a != a) != (b != b)) return a != a;
        if (a == b || a != a) return i < j;
        return a {sign} b;
    }};
    for (int step = 16; step > 0; step /= 2) {{
        const T other = __shfl_xor_sync(0xffffffff, value, step);
        const int64_t other_at = __shfl_xor_sync(0xffffffff, at, step);
        if (better(other, other_at, value, at)) {{ value = other; at = other_at; }}
    }}
    if constexpr (THREADS > 32) {{
        T* values = static_cast<T*>(scratch);
        int64_t* places = reinterpret_cast<int64_t*>(static_cast<char*>(scratch) + 32 * sizeof(double));
        __syncthreads();
        if (threadIdx.x % 32 == 0) {{ values[threadIdx.x / 32] = value; places[threadIdx.x / 32] = at; }}
        __syncthreads();
        value = values[0];
        at = places[0];
        for (int w = 1; w < THREADS / 32; ++w) {{
            if (better(values[w], places[w], value, at)) {{ value = values[w]; at = places[w]; }}
        }}
    }}
    return at;
}}"""

BLOCK = """// Combine one value per thread over the THREADS threads of a row; every thread gets the result.
template <int THREADS, typename T> __device__ __forceinline__ T block_{kind}(T a, void* scratch) {{
    for (int step = 16; step > 0; step /= 2) {{
        const T b = __shfl_xor_sync(0xffffffff, a, step);
        a = {combine};
    }}
    if constexpr (THREADS > 32) {{
        T* part = static_cast<T*>(scratch);
        __syncthreads();
        if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = a;
        __syncthreads();
        a = part[0];
        for (int w = 1; w < THREADS / 32; ++w) {{
            const T b = part[w];
            a = {combine};
        }}
    }}
    return a;
}}"""

CALL = """static inline int launched() {
    return (int)cudaGetLastError();
}"""


def preamble(
    helpers: set[str], blocks: set[str], bf16: bool, vectors: bool, extra: list[str]
) -> list[str]:
    """The lines before the first kernel."""
    lines = ["#include <cmath>", "#include <cstdint>", ""]
    if bf16:
        lines.insert(0, "#include <cuda_bf16.h>")
    lines[0:0] = [line for line in extra if line.startswith("#include")]
    needs = {"max": "nan_max", "min": "nan_min", "logaddexp": "log_add_exp"}
    wanted = helpers | {needs[b] for b in blocks if b in needs}
    if "log_add_exp" in wanted:
        wanted.add("nan_max")
    q = "template <typename T> __device__ __forceinline__"
    for text in helper_text(wanted & HELPERS.keys(), q, "__device__ __forceinline__"):
        lines += [*text.split("\n"), ""]
    if vectors:
        lines += [VEC, ""]
    for kind in sorted(blocks):
        if kind.startswith("arg"):
            sign, word = (">", "largest") if kind == "argmax" else ("<", "smallest")
            lines += [ARG.format(kind=kind, sign=sign, word=word), ""]
        else:
            lines += [BLOCK.format(kind=kind, combine=COMBINE[kind]), ""]
    lines += [line for line in extra if not line.startswith("#include")]
    return [*lines, CALL, ""]
