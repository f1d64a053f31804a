"""Tensors from the solution's process to the reference's, as bytes in files and without pickles.

The files lie in a folder of the judge's, in memory where /dev/shm is large enough. On a GPU both
sides keep them mapped and registered with the driver, so that a tensor goes from the device into
the file's pages and back by DMA: reading and writing the files cost half of all time in which a
measurement had to wait for a check.

Mapping device memory between the processes (CUDA IPC) would save these copies too, but opening a
handle made by another user in another network namespace hung in the driver on the H200 machine
it was tried on.
"""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path
from typing import Any

import torch

STAGING_BYTES = 16 << 20


def describe(value: torch.Tensor) -> dict[str, Any]:
    """Shape, dtype and layout, as JSON."""
    return {
        "shape": list(value.shape),
        "dtype": str(value.dtype).removeprefix("torch."),
        "contiguous": value.is_contiguous(),
    }


class Mailbox:
    """One file per output, made by the side that reads.

    It makes them as large as it expects them and belongs to another user where there is one: a
    writer cannot remove them, lock out the next, or have more read than expected. One that cuts
    a file short detaches it from what the reader has mapped; `renew` before the next writer. Not
    covered: one that does so behind a correct verdict spoils the later ones of its rollout.
    """

    def __init__(self, folder: str, device: str) -> None:
        self._folder = Path(folder)
        self._cuda = self._direct = device.startswith("cuda")
        self._mapped: dict[int, torch.Tensor] = {}
        self._sizes: dict[int, int] = {}
        """What the reader expects; empty in a writer."""

    def make(self, index: int, size_bytes: int) -> None:
        """Have a file for an output of this size."""
        if self._sizes.get(index) != size_bytes:
            self._forget(index)
            self._sizes[index] = size_bytes
        handle = os.open(self._path(index), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        with open(handle, "r+b", buffering=0) as file:
            file.truncate(size_bytes)
            os.fchmod(handle, 0o666)

    def renew(self) -> None:
        """New files in place of all, after a writer that may have tampered with them."""
        for index, size_bytes in self._sizes.items():
            self._forget(index)
            self._path(index).unlink(missing_ok=True)
            self.make(index, size_bytes)

    def put(self, index: int, value: torch.Tensor) -> dict[str, Any]:
        """Write a tensor and describe it. One that is larger than expected is only described."""
        flat = _bytes(value.detach().contiguous())
        if flat.numel() <= self._path(index).stat().st_size:
            mapped = self._map(index, flat.numel())
            if mapped is not None:
                mapped.copy_(flat)
            else:
                self._write(index, flat)
        return describe(value)

    def take(self, index: int, like: torch.Tensor) -> torch.Tensor:
        """Read a tensor of the shape, dtype and device of `like`. Raises ValueError, OSError."""
        value = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        flat = _bytes(value)
        there = self._path(index).stat().st_size
        if there < flat.numel():
            raise ValueError(f"expected {flat.numel()} bytes, got a file of {there}")
        mapped = self._map(index, flat.numel())
        if mapped is not None:
            flat.copy_(mapped)
        else:
            self._read(index, flat)
        return value

    def _path(self, index: int) -> Path:
        return self._folder / f"output.{index}"

    def _map(self, index: int, size_bytes: int) -> torch.Tensor | None:
        """The first bytes of a file as memory a GPU copies to; None where that does not work."""
        if not self._direct or size_bytes == 0:
            return None
        mapped = self._mapped.get(index)
        if mapped is None:
            length = self._sizes.get(index) or self._path(index).stat().st_size
            mapped = _mapping(self._path(index), length)
            if not _register(mapped):
                self._direct = False
                return None
            self._mapped[index] = mapped
        if mapped.numel() < size_bytes:
            raise ValueError(f"expected at most {mapped.numel()} bytes, got {size_bytes}")
        return mapped[:size_bytes]

    def _forget(self, index: int) -> None:
        mapped = self._mapped.pop(index, None)
        if mapped is not None:
            _unregister(mapped)

    def _write(self, index: int, flat: torch.Tensor) -> None:
        staging = _staging(self._cuda)
        with open(self._path(index), "r+b", buffering=0) as file:
            for piece in flat.split(STAGING_BYTES):
                part = staging[: piece.numel()]
                part.copy_(piece)
                if file.write(part.numpy().data) != piece.numel():
                    raise OSError(f"{self._path(index)}: written in part only")

    def _read(self, index: int, flat: torch.Tensor) -> None:
        staging = _staging(self._cuda)
        with open(self._path(index), "rb", buffering=0) as file:
            for piece in flat.split(STAGING_BYTES):
                part = staging[: piece.numel()]
                if file.readinto(part.numpy().data) != piece.numel():
                    raise ValueError(f"{self._path(index)} ended early")
                piece.copy_(part)


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return value.view(-1).view(torch.uint8)


@functools.cache
def _staging(pinned: bool) -> torch.Tensor:
    return torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=pinned)


def _mapping(path: Path, size_bytes: int) -> torch.Tensor:
    """A file's bytes as a tensor. Raises OSError."""
    try:
        return torch.from_file(str(path), shared=True, size=size_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(f"{path} cannot be mapped: {error}") from error


def _register(mapped: torch.Tensor) -> bool:
    """Pin the pages of a mapping; False where the driver or the file system refuses."""
    runtime = torch.cuda.cudart()
    if runtime.cudaHostRegister(mapped.data_ptr(), mapped.numel(), 0) == runtime.cudaError.success:
        return True
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")  # it would report the driver's last error as its own
    return False


def _unregister(mapped: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(mapped.data_ptr())


def flatten_outputs(outputs: Any) -> tuple[str, list[torch.Tensor]]:
    """(structure, tensors) of what a forward returned.

    Exactly `torch.Tensor`, or a tuple or list of those: a subclass could compute when it is
    looked at. Raises TypeError for anything else.
    """
    if type(outputs) is torch.Tensor:
        return "tensor", [outputs]
    if type(outputs) in (tuple, list) and all(type(item) is torch.Tensor for item in outputs):
        return f"{type(outputs).__name__} of {len(outputs)}", list(outputs)
    items = {type(item).__name__ for item in outputs} if isinstance(outputs, tuple | list) else {}
    raise TypeError(
        f"expected a torch.Tensor or a tuple or list of them, got {type(outputs).__name__}"
        + (f" of {', '.join(sorted(items))}" if items else "")
    )
