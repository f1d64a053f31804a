"""How many device contexts a minute a GPU makes and ends, for how many processes at once.

    python -m benchmarks.contexts --json=FILE

Every verdict makes a context and ends it, so this bounds how many of them a GPU can give. Each
process makes a context through the driver, allocates a little, and is killed, as a solution's
worker is; then it begins anew, `--seconds` long. With the environments of VARIANTS, since how many
channels a context has, and when its code is loaded, are the driver's to choose. With --torch the
processes ask by way of torch, for a random tensor and a sum.

Prints a table: contexts a minute, and the median milliseconds to make one and to end one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from training_export.run_record import git_commit

TOGETHER = (1, 4, 8, 16)
VARIANTS: dict[str, dict[str, str]] = {
    "as it is": {},
    "one channel": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    "two channels": {"CUDA_DEVICE_MAX_CONNECTIONS": "2"},
    "code loaded at once": {"CUDA_MODULE_LOADING": "EAGER"},
}
DRIVER = """
import ctypes, os, sys, time
cuda = ctypes.CDLL("libcuda.so.1")
sys.stdin.readline()
started = time.perf_counter()
device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
for code in (
    cuda.cuInit(0), cuda.cuDeviceGet(ctypes.byref(device), 0),
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), cuda.cuCtxSetCurrent(context),
    cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(1 << 20)), cuda.cuCtxSynchronize(),
):
    assert code == 0, code
print(time.perf_counter() - started, flush=True)
time.sleep(3600)
"""
TORCH = """
import sys, time
import torch
sys.stdin.readline()
started = time.perf_counter()
torch.randn(1 << 20, device="cuda").sum().item()
print(time.perf_counter() - started, flush=True)
time.sleep(3600)
"""


def one_context(code: str, environment: dict[str, str]) -> tuple[float, float]:
    """Seconds to make a context and to end it. Raises RuntimeError when that fails."""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, **environment},
    )  # fmt: skip
    with process:
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("a process without pipes")
        with contextlib.suppress(BrokenPipeError):  # it has died; that it says nothing tells
            process.stdin.write("\n")
            process.stdin.flush()
        said = process.stdout.readline()
        began = time.perf_counter()
        process.kill()
        process.wait()
        ended_s = time.perf_counter() - began
    if not said:
        raise RuntimeError("a process could make no context; its own message is on stderr")
    return float(said), ended_s


def measure(
    code: str, environment: dict[str, str], together: int, seconds: float
) -> dict[str, Any]:
    """So many processes at once, each making one context after the other."""
    made: list[tuple[float, float]] = []
    failed: list[Exception] = []
    until = time.monotonic() + seconds

    def loop() -> None:
        try:
            while time.monotonic() < until:
                made.append(one_context(code, environment))
        except Exception as error:
            failed.append(error)

    started = time.monotonic()
    threads = [threading.Thread(target=loop) for _ in range(together)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return {
        "together": together,
        "a_minute": round(len(made) / (time.monotonic() - started) * 60, 1),
        "make_ms": round(statistics.median(m for m, _ in made) * 1e3, 1),
        "end_ms": round(statistics.median(e for _, e in made) * 1e3, 1),
        "samples_ms": [[round(m * 1e3, 1), round(e * 1e3, 1)] for m, e in made],
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'':<22}{'at once':>9}{'a minute':>10}{'ms to make':>12}{'ms to end':>11}"]
    for row in rows:
        lines.append(
            f"{row['variant']:<22}{row['together']:>9}{row['a_minute']:>10.1f}"
            f"{row['make_ms']:>12.1f}{row['end_ms']:>11.1f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each row")
    parser.add_argument("--torch", action="store_true", help="ask by way of torch")
    parser.add_argument("--json")
    options = parser.parse_args()
    code = TORCH if options.torch else DRIVER
    rows = [
        {"variant": name, **measure(code, environment, together, options.seconds)}
        for name, environment in VARIANTS.items()
        for together in TOGETHER
    ]
    print(table(rows))
    if options.json:
        root = Path(__file__).resolve().parent.parent
        found = {"commit": git_commit(str(root)), "command": sys.argv[1:], "rows": rows}
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
