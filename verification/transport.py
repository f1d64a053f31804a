"""Tensors from one process to another as bytes in a file, without pickles.

The file lies in the scratch folder, which is memory where /dev/shm is large enough. A reader
takes shape and dtype from the description only after checking them against the size.

Mapping device memory between the processes (CUDA IPC) would save the copies, but opening a
handle made by another user in another network namespace hung in the driver on the H200 machine
it was tried on.
"""

from __future__ import annotations

import functools
import os
import stat
from typing import Any

import torch

STAGING_BYTES = 16 << 20
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.bfloat16, torch.float16,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip


@functools.cache
def _staging(pinned: bool) -> torch.Tensor:
    """Memory of this process that a GPU copies to and from at full speed."""
    return torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=pinned)


def send_tensor(value: torch.Tensor, path: str) -> dict[str, Any]:
    """Write a tensor's bytes to `path` and describe it.

    Written piece by piece: memory mapped from the file would cost a page fault for every 4 KiB.
    A file that exists is written over, because fresh pages cost more than the copy.
    """
    flat = value.detach().contiguous().view(-1).view(torch.uint8)
    staging = _staging(flat.is_cuda)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    with open(handle, "wb", buffering=0) as file:
        file.truncate(flat.numel())
        for piece in flat.split(STAGING_BYTES):
            part = staging[: piece.numel()]
            part.copy_(piece)
            if file.write(part.numpy().data) != piece.numel():
                raise OSError(f"{path}: written in part only")
    return {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}


def receive_tensor(description: dict[str, Any], path: str, device: str) -> torch.Tensor:
    """The tensor behind a description. Raises ValueError when the two do not fit.

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
    value = torch.empty(shape, dtype=dtype, device=device)
    staging = _staging(value.is_cuda)
    with open(path, "rb", buffering=0) as file:
        for piece in value.view(-1).view(torch.uint8).split(STAGING_BYTES):
            part = staging[: piece.numel()]
            if file.readinto(part.numpy().data) != piece.numel():
                raise ValueError(f"{path} ended early")
            piece.copy_(part)
    return value


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
