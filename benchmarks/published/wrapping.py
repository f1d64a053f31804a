"""Functions written for another harness, as `ModelNew` in one of our forms.

A submission is a module with a function. Its text stays as it is, at the head of `model_new.py`,
so that whatever it does when it is imported is done; a class behind it calls the function. So that
there is something to build, and something that is missed when the knock-out kills it, a kernel of
ours copies the first input, and the function gets the copy. It gets no other help.
"""

from __future__ import annotations

from schemas.records import Target
from verification.folder import MODEL

COPY_CUDA = """
#include <cuda_runtime.h>
#include <stdint.h>

__global__ void copy(const uint4* from, uint4* to, int64_t wide, int64_t bytes) {
    int64_t first = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    for (int64_t i = first; i < wide; i += gridDim.x * (int64_t)blockDim.x) to[i] = from[i];
    int64_t rest = wide * 16 + first;
    if (rest < bytes) ((char*)to)[rest] = ((const char*)from)[rest];
}

extern "C" int copy_bytes(const void* from, void* to, int64_t bytes, cudaStream_t stream) {
    copy<<<4096, 256, 0, stream>>>((const uint4*)from, (uint4*)to, bytes / 16, bytes);
    return (int)cudaGetLastError();
}
"""
COPY_CPU = """
#include <cstdint>

extern "C" int copy_bytes(const char* from, char* to, int64_t bytes, void*) {
    for (int64_t i = 0; i < bytes; ++i) to[i] = from[i];
    return 0;
}
"""
HEAD = """

# What follows is not the submission's: it makes a module of it.
import cabi as _cabi
import torch as _torch

_copy_bytes = _cabi.load().copy_bytes


def _copied(x):
    x = x.contiguous()
    copy = _torch.empty_like(x)
    _copy_bytes(x, copy, x.numel() * x.element_size())
    return copy


class ModelNew(_torch.nn.Module):
"""


def returning(code: str, entry: str, target: Target) -> dict[str, str]:
    """A module whose function `entry` takes the inputs and returns the output."""
    return _files(code, target, f"""\
    def forward(self, x, *more):
        return {entry}(_copied(x), *more)
""")  # fmt: skip


def filling(code: str, entry: str, shape: str, target: Target) -> dict[str, str]:
    """A module whose function `entry` takes an output to fill, then the inputs. `shape`: of the
    output, as Python of the first input `x`."""
    return _files(code, target, f"""\
    def forward(self, x, *more):
        output = _torch.empty({shape}, dtype=x.dtype, device=x.device)
        {entry}(output, _copied(x), *more)
        return output
""")  # fmt: skip


def _files(code: str, target: Target, forward: str) -> dict[str, str]:
    cpu = target is Target.CPU
    path = "kernels/copy.cpp" if cpu else "kernels/copy.cu"
    return {MODEL: code + HEAD + forward, path: COPY_CPU if cpu else COPY_CUDA}
