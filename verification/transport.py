"""Tensors from one process to another as bytes in a file, without pickles.

The file lies in the scratch folder, which is memory where /dev/shm is large enough. A reader
takes shape and dtype from the description only after checking them against the size.

Mapping device memory between the processes (CUDA IPC) would save the copies, but opening a
handle made by another user in another network namespace hung in the driver on the H200 machine
it was tried on.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import torch

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.bfloat16, torch.float16,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip


def send_tensor(value: torch.Tensor, path: str) -> dict[str, Any]:
    """Write a tensor's bytes to `path` and describe it."""
    flat = value.detach().contiguous().view(-1)
    if flat.numel() > 0:
        # Straight from the device into the file's pages.
        size = flat.numel()
        torch.from_file(path, shared=True, size=size, dtype=flat.dtype).copy_(flat)
        os.chmod(path, 0o644)
    else:
        Path(path).touch()
    return {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}


def receive_tensor(description: dict[str, Any], path: str) -> torch.Tensor:
    """The tensor behind a description, on the CPU. Raises ValueError when the two do not fit.

    `path` is where the reader expects the bytes: a description cannot name another file.
    """
    dtype = DTYPES.get(str(description["dtype"]))
    shape = [int(size) for size in description["shape"]]
    if dtype is None or any(size < 0 for size in shape):
        raise ValueError(f"not a tensor: {shape} {description['dtype']!r}")
    count = torch.Size(shape).numel()
    info = os.lstat(path)
    if not stat.S_ISREG(info.st_mode):
        raise ValueError(f"expected a plain file at {path}")
    size = info.st_size
    if size != count * dtype.itemsize:
        raise ValueError(f"expected {count * dtype.itemsize} bytes for {shape}, got {size}")
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.from_file(path, shared=False, size=count, dtype=dtype).view(shape)


def flatten_outputs(outputs: Any) -> tuple[str, list[torch.Tensor]]:
    """(structure, tensors) of what a forward returned.

    Exactly `torch.Tensor`, or a tuple or list of those: a subclass could compute when it is
    looked at. Raises TypeError for anything else.
    """
    if type(outputs) is torch.Tensor:
        return "tensor", [outputs]
    if type(outputs) in (tuple, list) and all(type(item) is torch.Tensor for item in outputs):
        return f"{type(outputs).__name__} of {len(outputs)}", list(outputs)
    raise TypeError(
        f"expected a torch.Tensor or a tuple or list of them, got {type(outputs).__name__}"
    )
