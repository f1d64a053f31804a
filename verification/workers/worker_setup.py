"""What the reference's and the solution's processes have in common."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from schemas.records import Precision

KEPT_BYTES = 1 << 30


def set_precision(precision: str) -> None:
    """torch's switches for a precision class; cuDNN convolutions use TF32 unless told not to."""
    tf32 = precision == Precision.TF32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32


def set_device(device: str, num_threads: int, device_memory_gib: float) -> None:
    """Threads, and on a GPU the share of its memory this process may take."""
    torch.set_num_threads(num_threads)
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, device_memory_gib * 2**30 / total))


def opener(config: dict[str, Any], isolation: dict[str, bool]) -> Callable[[], dict[str, Any]]:
    """The first call of a worker: it makes the device's context, and says how confined it is."""

    def open_device() -> dict[str, Any]:
        set_device(config["device"], config["num_threads"], config["device_memory_gib"])
        if config["device"].startswith("cuda"):
            torch.empty(1, device=config["device"])
            torch.cuda.synchronize()
            # Remembered from here on. Some versions ask NVML, and a solution that wants to know
            # would seem to load a foreign library.
            torch.cuda.device_count()
        return {"isolation": isolation}

    return open_device


def synchronize() -> None:
    """Wait for the device, so that no work outlasts the lease it was started under."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def release(device: str) -> None:
    """Give cached device memory back: other processes need it too.

    A little may stay, because every allocation the driver sees waits for those of all others.
    """
    if device.startswith("cuda") and torch.cuda.memory_reserved() > KEPT_BYTES:
        gc.collect()
        torch.cuda.empty_cache()


def shares_memory(outputs: list[torch.Tensor], inputs: list[Any]) -> bool:
    pointers = {
        v.untyped_storage().data_ptr() for v in inputs if isinstance(v, torch.Tensor) and v.numel()
    }
    return any(o.untyped_storage().data_ptr() in pointers for o in outputs if o.numel())
