# ruff: noqa: E501, SIM905 - C text and word lists read better whole
"""What stands at the top of a generated C++ file: includes, vector math declarations, bfloat16,
small helpers."""

from __future__ import annotations

from kernel_agent.expert.printer import HELPERS, helper_text

# Functions with a vector version in glibc's libmvec (2.35 and later); float names.
VECTOR_MATH_1 = set(
    """expf exp2f expm1f logf log2f log10f log1pf sinf cosf tanf asinf acosf atanf sinhf coshf tanhf asinhf acoshf
    atanhf erff erfcf""".split()
)
VECTOR_MATH_2 = {"powf", "atan2f", "hypotf"}

BF16 = """// bfloat16 is the upper half of a float.
static inline float bf16_to_float(uint16_t bits) {
    const uint32_t wide = (uint32_t)bits << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
}

// Round to nearest, ties to even; NaN stays NaN.
static inline uint16_t float_to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)(value != value ? 0x7FC0 : rounded);
}"""

REDUCTIONS = {
    "nan_max": "#pragma omp declare reduction(nan_max : float : omp_out = nan_max(omp_out, omp_in)) "
    "initializer(omp_priv = -INFINITY)",
    "nan_min": "#pragma omp declare reduction(nan_min : float : omp_out = nan_min(omp_out, omp_in)) "
    "initializer(omp_priv = INFINITY)",
}


def preamble(helpers: set[str], functions: set[str], bf16: bool, reductions: set[str]) -> list[str]:
    """The lines before the first kernel."""
    lines = ["#include <algorithm>", "#include <cmath>", "#include <cstdint>", "#include <cstring>"]
    lines += ["#include <vector>", ""]
    lines += _vector_math(functions)
    if bf16:
        lines += [BF16, ""]
    texts = helper_text(
        helpers & HELPERS.keys(), "template <typename T> static inline", "static inline"
    )
    for text in texts:
        lines += [*text.split("\n"), ""]
    lines += [REDUCTIONS[name] for name in sorted(reductions)]
    return [*lines, ""] if reductions else lines


def _vector_math(functions: set[str]) -> list[str]:
    one = sorted(functions & VECTOR_MATH_1)
    two = sorted(functions & VECTOR_MATH_2)
    if not one and not two:
        return []
    start = '__attribute__((simd("notinbranch"), const)) float'
    return [
        "#if defined(__x86_64__) && defined(__GLIBC__)",
        "// These have vector versions in libmvec: loops that call them vectorise.",
        'extern "C" {',
        *(f"{start} {name}(float) noexcept;" for name in one),
        *(f"{start} {name}(float, float) noexcept;" for name in two),
        "}",
        "#endif",
        "",
    ]
