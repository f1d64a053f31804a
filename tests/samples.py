"""One small problem and solutions to it, right and wrong, for tests of the verifier."""

from __future__ import annotations

from schemas.codec import content_id
from schemas.records import Precision, Problem, Solution, Target

CODE = '''"""scale, shift and gelu

precision: fp32
"""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x * self.weight)


rows, features = 4099, 1024


def get_inputs():
    return [torch.randn(rows, features)]


def get_init_inputs():
    return [features]
'''

MODEL_NEW = """import cabi
import torch
import torch.nn as nn

lib = cabi.load()


class ModelNew(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        lib.scale_gelu(x, self.weight, out, x.shape[0], x.shape[1])
        return out
"""

KERNEL = """#include <cstdint>
extern "C" __attribute__((simd("notinbranch"), const)) float erff(float);

extern "C" int scale_gelu(const float* __restrict x, const float* __restrict w,
                          float* __restrict out, int64_t rows, int64_t cols, void*) {
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; ++r)
#pragma omp simd
        for (int64_t c = 0; c < cols; ++c) {
            float v = x[r * cols + c] * w[c];
            out[r * cols + c] = 0.5f * v * (1.0f + erff(v * 0.70710678f));
        }
    return 0;
}
"""


def problem() -> Problem:
    return Problem(
        problem_id=content_id(CODE),
        code=CODE,
        ops=("torch.mul", "F.gelu"),
        data_source="torch#2",
        families=("activation", "elementwise"),
        target=Target.CPU,
        precision=Precision.FP32,
        seed=0,
        index=0,
    )


def solution(model_new: str = MODEL_NEW, kernel: str = KERNEL) -> Solution:
    return Solution.of({"model_new.py": model_new, "kernels/scale_gelu.cpp": kernel})
