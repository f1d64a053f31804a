"""Tensors from one process to another without copying gigabytes, and without pickles.

On a CUDA device an output stays where it is and its memory handle travels; the reader maps it.
On a CPU the bytes go through a file in the scratch folder (memory, where /dev/shm is large
enough). A reader takes shape and dtype from the description only after checking them against the
size.
"""

from __future__ import annotations

import base64
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


def send_tensor(value: torch.Tensor, path: str, share: bool) -> dict[str, Any]:
    """Make a contiguous tensor readable by another process; the sender keeps it alive until then.

    `share`: hand over a mapping of device memory instead of writing the bytes to `path`.
    """
    description: dict[str, Any] = {
        "shape": list(value.shape),
        "dtype": str(value.dtype).removeprefix("torch."),
    }
    if share and value.numel() > 0:
        handle = value.untyped_storage()._share_cuda_()
        encoded = [base64.b64encode(h).decode() if isinstance(h, bytes) else h for h in handle]
        return description | {"cuda": encoded, "offset": value.storage_offset()}
    value.cpu().flatten().view(torch.uint8).numpy().tofile(path)
    return description | {"file": path}


def receive_tensor(description: dict[str, Any], path: str) -> torch.Tensor:
    """The tensor behind a description. Raises ValueError when the two do not fit.

    `path` is where the reader expects the bytes: a description cannot name another file.
    """
    dtype = DTYPES.get(str(description["dtype"]))
    shape = [int(size) for size in description["shape"]]
    if dtype is None or any(size < 0 for size in shape):
        raise ValueError(f"not a tensor: {shape} {description['dtype']!r}")
    count = torch.Size(shape).numel()
    if "cuda" in description:
        handle = [base64.b64decode(h) if isinstance(h, str) else h for h in description["cuda"]]
        storage = torch.UntypedStorage._new_shared_cuda(*handle)
        value = torch.empty(0, dtype=dtype, device=storage.device)
        strides = torch.empty(shape, device="meta").stride()
        return value.set_(storage, int(description["offset"]), shape, strides)
    size = Path(path).stat().st_size
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
