"""Watching launches on a real GPU: `python -m tests.gpu_launches`, a minute on an H200.

Builds a small library as the verifier does and runs it, torch's kernels, graphs and a dead copy
under the watcher, in processes of three kinds:

    watch    started before the process has a CUDA context
    forked   the same after a fork, as an unprivileged user: a solution's worker
    plain    no watcher, to compare what a launch costs

Prints every report as JSON, says for each expectation whether it holds, and fails if one does not.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from verification.building.knockout import knock_out
from verification.workers.attribution import Launches, LaunchReport, build_launches, find_cuda_home

ROOT = Path(__file__).resolve().parent.parent
NOBODY = 65534
LAUNCHES = 2000
SOURCE = """
#include <cooperative_groups.h>
#include <cstdint>
#include <cuda_runtime.h>
__global__ void own_scale(const float* x, float* y, int64_t n) {
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i < n) y[i] = 2.0f * x[i];
}
template <int N> __global__ void own_add(float* y, int64_t n) {
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i < n) y[i] += N;
}
__global__ void own_empty() {}
__global__ void own_spin(int64_t ns) {
    uint64_t start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - start < ns);
}
__global__ void own_grid(float* y) { cooperative_groups::this_grid().sync(); y[threadIdx.x] = 5; }
extern "C" {
int scale_add(const float* x, float* y, int64_t n, cudaStream_t s) {
    own_scale<<<(n + 255) / 256, 256, 0, s>>>(x, y, n);
    own_add<3><<<(n + 255) / 256, 256, 0, s>>>(y, n);
    return cudaGetLastError();
}
int empty(cudaStream_t s) { own_empty<<<1, 32, 0, s>>>(); return cudaGetLastError(); }
int spin(int64_t ns, cudaStream_t s) { own_spin<<<1, 1, 0, s>>>(ns); return cudaGetLastError(); }
int grid(float* y, cudaStream_t s) {
    void* args[] = {&y};
    return cudaLaunchCooperativeKernel((void*)own_grid, 2, 32, args, 0, s);
}
int extended(float* y, int64_t n, cudaStream_t s) {
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = 4; config.blockDim = 256; config.stream = s;
    config.attrs = &attribute; config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, own_add<7>, y, n);
}
int fill(float* y, int64_t n, cudaStream_t s) { return cudaMemsetAsync(y, 0, n * 4, s); }
}
"""


class Solution:
    """A library called as a `cabi` solution is."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def __call__(self, name: str, *arguments: Any) -> None:
        converted = [
            ctypes.c_void_p(value.data_ptr())
            if isinstance(value, torch.Tensor)
            else ctypes.c_int64(value)
            for value in arguments
        ]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        code = getattr(self._library, name)(*converted, stream)
        if code != 0:
            raise RuntimeError(f"{name} returned CUDA error {code}")


class Bench:
    """One process: the watcher, the solution, and expectations printed as they are checked."""

    def __init__(self, mode: str, folder: Path) -> None:
        self.mode = mode
        self.folder = folder
        self.failed: list[str] = []
        self.launches = Launches(next(folder.glob("launches-*.so")))
        started = time.perf_counter()
        self.launches.start()
        print(json.dumps({"mode": mode, "start_ms": (time.perf_counter() - started) * 1e3}))
        self.own = self.solution("own.so")
        self.x = torch.randn(1 << 20, device="cuda")
        self.y = torch.empty_like(self.x)

    def solution(self, name: str) -> Solution:
        self.launches.own(self.folder / name)
        return Solution(self.folder / name)

    def scale_add(self) -> None:
        self.own("scale_add", self.x, self.y, self.x.numel())

    def expect(self, name: str, holds: bool, detail: Any = "") -> None:
        print(f"{'ok  ' if holds else 'FAIL'} {self.mode}: {name} {detail}", flush=True)
        if not holds:
            self.failed.append(f"{self.mode}: {name}")

    def watched(self, name: str, work: Callable[[], Any]) -> LaunchReport:
        self.launches.begin()
        work()
        report = self.launches.end()
        print(json.dumps({"mode": self.mode, "phase": name, **asdict(report)}), flush=True)
        self.expect(f"{name}: no problems", report.problems == (), report.problems)
        return report

    def expect_counts(self, name: str, work: Callable[[], Any], own: int, foreign: int) -> None:
        """How often own and foreign kernels run."""
        report = self.watched(name, work)
        counts = tuple(sum(use.records for use in report.of(own=side)) for side in (True, False))
        self.expect(f"{name}: own and foreign", counts == (own, foreign), counts)
        timed = all(use.device_ms > 0 for use in report.kernels)
        self.expect(f"{name}: all have time", timed)


def _kernels(bench: Bench) -> None:
    x, y, own = bench.x, bench.y, bench.own

    def mixed() -> None:
        bench.scale_add()
        torch.add(x, 1)

    bench.expect_counts("own", bench.scale_add, 2, 0)
    bench.expect("own: the result is right", torch.equal(y, 2 * x + 3))
    bench.expect_counts("add", lambda: torch.add(x, 1), 0, 1)
    bench.expect_counts("mixed", mixed, 2, 1)
    m = torch.randn(512, 512, device="cuda")
    report = bench.watched("mm", lambda: torch.mm(m, m))
    bench.expect("mm: foreign", bool(report.of(own=False)) and not report.of(own=True))
    with torch.cuda.stream(torch.cuda.Stream()):
        bench.expect_counts("stream", bench.scale_add, 2, 0)
    bench.expect_counts("cooperative", lambda: own("grid", y), 1, 0)
    bench.expect_counts("extended", lambda: own("extended", y, 1024), 1, 0)
    bench.expect_counts("nothing", lambda: None, 0, 0)


def _copies(bench: Bench) -> None:
    for name, work in (
        ("copy", lambda: bench.y.copy_(bench.x)),
        ("fill", lambda: bench.own("fill", bench.y, bench.y.numel())),
    ):
        report = bench.watched(name, work)
        bench.expect(f"{name}: one copy", (report.copies, report.kernels) == (1, ()))


def _graphs(bench: Bench) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bench.scale_add()
        bench.y.mul_(2.0)
    bench.expect_counts("graph", graph.replay, 2, 1)
    bench.expect_counts("graph again", graph.replay, 2, 1)


def _dead(bench: Bench) -> None:
    corpse = bench.solution("dead.so")
    bench.y.fill_(7.0)
    bench.expect_counts(
        "dead", lambda: corpse("scale_add", bench.x, bench.y, bench.x.numel()), 2, 0
    )
    bench.expect("dead: nothing is written", bool((bench.y == 7.0).all()))


def _made_at_run_time(bench: Bench) -> None:
    text = 'extern "C" __global__ void made_here(float* y) { y[threadIdx.x] = 1.0f; }'
    made = torch.cuda._compile_kernel(text, "made_here")
    where = {"grid": (1, 1, 1), "block": (32, 1, 1)}
    bench.expect_counts("made at run time", lambda: made(**where, args=[bench.y]), 0, 1)
    bench.expect("the control is seen", bench.launches.control())


def _clocks(bench: Bench) -> None:
    for ms in (0.2, 2.0, 20.0):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def work(start: Any = start, stop: Any = stop, ms: float = ms) -> None:
            start.record()
            bench.own("spin", int(ms * 1e6))
            stop.record()

        report = bench.watched(f"spin {ms} ms", work)
        by_events = start.elapsed_time(stop)
        # Events count from before the launch to an idle device, 0.2 ms where its code is loaded.
        agree = -0.02 < by_events - report.busy_ms < 0.5 and report.busy_ms < 0.02 + 1.01 * ms
        bench.expect("busy and events agree", agree, (ms, report.busy_ms, by_events))


def _costs(bench: Bench) -> None:
    costs = {"idle_us": _launch_us(bench.own)}
    bench.launches.begin()
    costs["active_us"] = _launch_us(bench.own)
    report = bench.launches.end()
    kept = sum(use.records for use in report.of(own=True))
    bench.expect("none of many launches is lost", kept == 5 * LAUNCHES, report.problems)
    started = time.perf_counter()
    for _ in range(20):
        bench.launches.begin()
        bench.launches.end()
    costs["begin_end_us"] = round((time.perf_counter() - started) / 20 * 1e6, 1)
    print(json.dumps({"mode": bench.mode, "costs": costs}), flush=True)


def _launch_us(own: Solution) -> float:
    """Microseconds a launch, the best of five rounds."""
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(LAUNCHES):
            own("empty")
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - started) / LAUNCHES * 1e6)
    return round(best, 3)


def _child(mode: str, folder: Path) -> list[str]:
    """What does not hold in this process."""
    if mode == "plain":
        print(json.dumps({"mode": mode, "costs": {"us": _launch_us(Solution(folder / "own.so"))}}))
        return []
    bench = Bench(mode, folder)
    for part in (_kernels, _copies, _graphs, _dead, _made_at_run_time, _clocks, _costs):
        try:
            part(bench)
        except Exception:
            print(traceback.format_exc(), flush=True)
            bench.expect(part.__name__, False, "raised")
    return bench.failed


def _forked(folder: Path) -> int:
    """As a solution's worker: forked from a process with torch imported, then unprivileged."""
    child = os.fork()
    if child == 0:
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        os.environ["HOME"] = "/tmp"
        failed = ["forked: did not run"]
        try:
            failed = _child("forked", folder)
        finally:
            sys.stdout.flush()
            os._exit(1 if failed else 0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _build(folder: Path) -> None:
    (folder / "own.cu").write_text(SOURCE)
    capability = "".join(map(str, torch.cuda.get_device_capability()))
    arch = f"-gencode=arch=compute_{capability},code=sm_{capability}"
    common = ["nvcc", arch, "-std=c++17", "-O3", "-lineinfo", "-Xcompiler", "-fPIC"]
    made = [*common, "--no-compress", "-c", "own.cu", "-o", "own.o"]
    linked = ["nvcc", "-shared", "--no-device-link", "own.o", "-o", "own.so"]
    for command in (made, linked):
        subprocess.run(command, cwd=folder, check=True)
    print("killed", knock_out(folder / "own.so", folder / "dead.so"))
    native, reason = build_launches(folder)
    if native is None:
        raise SystemExit(f"no watcher: {reason} (CUDA home: {find_cuda_home()})")


def main() -> int:
    if len(sys.argv) == 3:
        mode, folder = sys.argv[1], Path(sys.argv[2])
        return _forked(folder) if mode == "forked" else len(_child(mode, folder))
    work = Path(tempfile.mkdtemp(prefix="gpu-launches-", dir="/tmp"))
    work.chmod(0o755)
    try:
        _build(work)
        codes = {}
        for mode in ("watch", "forked", "plain"):
            command = [sys.executable, "-m", "tests.gpu_launches", mode, str(work)]
            codes[mode] = subprocess.run(command, cwd=ROOT, timeout=180).returncode
        print("exit codes", codes)
        return 1 if any(codes.values()) else 0
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
