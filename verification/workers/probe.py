"""What the machine is and what it can do at best, found out in a worker of its own.

A worker, because asking a GPU anything makes a device context, and neither the judge nor the
warm parent is to have one.
"""

from __future__ import annotations

import platform
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from schemas.codec import content_id, to_json
from schemas.records import Environment, Precision, Target
from verification.workers.worker_setup import set_device, set_precision

COPY_BYTES = {"cpu": 64 << 20, "cuda": 2 << 30}
MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}


def environment(target: Target, device: str, num_threads: int) -> Environment:
    """What every number measured here carries along; the compiler is filled in by the caller."""
    cuda = target is Target.CUDA
    properties = torch.cuda.get_device_properties(device) if cuda else None
    node = platform.node()
    return Environment(
        device=properties.name if properties else _cpu_name(),
        device_id=_device_id("gpu", properties.uuid) if properties else _device_id("cpu", node),
        driver=_driver() if cuda else None,
        toolkit=torch.version.cuda if cuda else None,
        compiler="",
        torch=torch.__version__,
        python=platform.python_version(),
        num_threads=num_threads,
        platform=f"{sys.platform}-{platform.machine()}",
    )


def _device_id(kind: str, name: object) -> str:
    """Tells devices apart without publishing serial numbers or host names."""
    return f"{kind}-{content_id(str(name))[:8]}"


def _driver() -> str | None:
    """From the kernel module, since a confined process runs no programs such as nvidia-smi."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\b\d{3}\.\d+(?:\.\d+)?\b", text)
    return found[0] if found else None


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [
                line.split(":", 1)[1].strip() for line in file if line.startswith("model name")
            ]
    except FileNotFoundError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def copy_rate(device: str) -> float:
    """Bytes per second of a large copy, counting bytes read and bytes written."""
    size = COPY_BYTES[device.split(":")[0]]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _seconds(lambda: target.copy_(source), device)


def matmul_rate(device: str, precision: Precision) -> float:
    """FLOPs per second of a large square matrix product in a precision class, on random data."""
    set_precision(precision)
    size = MATMUL_SIZE[device.split(":")[0]]
    dtype = torch.bfloat16 if precision is Precision.BF16 else torch.float32
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _seconds(lambda: a @ b, device)


def _seconds(call: Callable[[], Any], device: str, samples: int = 9) -> float:
    times = []
    for _ in range(samples + 2):
        started = time.perf_counter()
        call()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times[2:])  # a floor: noise only ever adds


def handlers(config: dict[str, Any], isolation: dict[str, bool]) -> dict[str, Callable[..., Any]]:
    """The entry point of a probe worker."""
    device, threads = config["device"], config["num_threads"]
    target = Target(config["target"])
    set_device(device, threads, config["device_memory_gib"])

    def capability() -> str | None:
        if target is Target.CPU:
            return None
        return "".join(map(str, torch.cuda.get_device_capability(device)))

    return {
        "environment": lambda: {
            "environment": to_json(environment(target, device, threads)),
            "capability": capability(),
            "isolation": isolation,
        },
        "rates": lambda: {
            "copy": copy_rate(device),
            **{str(p): matmul_rate(device, p) for p in Precision},
        },
    }
