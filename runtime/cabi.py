"""The loader of `cabi` solutions: plain C functions called with raw pointers.

A solution writes `import cabi`, `lib = cabi.load()` and calls `lib.name(tensor, 3, 0.5)`. A tensor
becomes its data pointer, an int or bool an int64, a float a double, and the stream comes last (the
current CUDA stream, NULL on a CPU). A launcher returns 0, or an error code that is raised here as
RuntimeError.

The worker that runs a solution binds the library with `bind` before it imports `model_new`.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_path: str | None = None


def bind(path: str) -> None:
    """Say which shared library `load` opens."""
    global _path
    _path = path


def load() -> Library:
    """The library built from the solution's `kernels/`. Raises RuntimeError when none is bound."""
    if _path is None:
        raise RuntimeError("no library is bound: solutions are loaded by the verifier")
    return Library(_path)


class Library:
    """C functions by name; each attribute is callable."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)
        function.restype = ctypes.c_int

        def call(*arguments: Any) -> None:
            stream = torch.cuda.current_stream().cuda_stream if torch.cuda.is_initialized() else 0
            code = function(*map(_convert, arguments), ctypes.c_void_p(stream))
            if code != 0:
                raise RuntimeError(f"{name} returned error {code}")

        setattr(self, name, call)
        return call


def _convert(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, bool | int):
        return ctypes.c_int64(value)
    if isinstance(value, float):
        return ctypes.c_double(value)
    raise TypeError(f"expected a tensor, int, bool or float, got {type(value).__name__}")
