"""Does a verdict call something faster that is not, and does it see a small gain that is there?

    python -m benchmarks.aa --target=cuda --num_same=600 --num_gain=100 --json=FILE

same    eager against eager, in the interleaved rounds of a verdict of effort `reward`: how often
        does the lower end of the speedup's interval clear the threshold of "faster"?
gain    a solution that takes eager's time / 1.08: how often does it clear the threshold?

The solution of `gain` does its work and then waits on the device; how long is found out beforehand,
by measuring it a few times. Both use the verifier's own bench and stopwatch. Prints a table; with
--json the raw ratios go to a file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from benchmarks.verdict import open_machine
from dedup.signature import signature
from schemas.codec import content_id, to_json
from schemas.records import Admission, Interval, Precision, Problem, Solution, Target
from training_export.run_record import git_commit
from verification import timing
from verification.admission import admit
from verification.draft import Draft
from verification.harness import harness_hash
from verification.judge import Judge
from verification.machine import Machine
from verification.measuring import Stopwatch

THRESHOLD = 1.0 / 0.95
"""Of "faster": (t0 - t) / t0 is more than 5 %."""
GAIN = 1.08
CALIBRATIONS = 4
ROWS = {Target.CPU: 2048, Target.CUDA: 196608}

CODE = '''"""scale and gelu

precision: fp32
"""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(torch.sin(x * self.weight))


def get_inputs():
    return [torch.randn(ROWS, 1024)]


def get_init_inputs():
    return [1024]
'''
MODEL_NEW = """import cabi
import torch
import torch.nn as nn

lib = cabi.load()


class ModelNew(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        lib.work(x, self.weight, out, x.numel(), x.shape[-1], WAIT_NS)
        return out
"""
CPU_KERNEL = """#include <cstdint>
#include <ctime>
extern "C" __attribute__((simd("notinbranch"), const)) float sinf(float);
extern "C" __attribute__((simd("notinbranch"), const)) float erff(float);
static int64_t now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}
extern "C" int work(const float* x, const float* w, float* out, int64_t n, int64_t cols,
                    int64_t wait_ns, void*) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < n / cols; ++row)
#pragma omp simd
        for (int64_t col = 0; col < cols; ++col) {
            float v = sinf(x[row * cols + col] * w[col]);
            out[row * cols + col] = 0.5f * v * (1.0f + erff(v * 0.70710678f));
        }
    for (int64_t end = now() + wait_ns; now() < end;) {}
    return 0;
}
"""
CUDA_KERNEL = """#include <cstdint>
#include <cuda_runtime.h>
__global__ void scale(const float* x, const float* w, float* out, int64_t n, int64_t cols) {
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i >= n) return;
    float v = sinf(x[i] * w[i % cols]);
    out[i] = 0.5f * v * (1.0f + erff(v * 0.70710678f));
}
__global__ void wait(int64_t ns) {
    uint64_t start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while ((int64_t)(now - start) < ns);
}
extern "C" int work(const float* x, const float* w, float* out, int64_t n, int64_t cols,
                    int64_t wait_ns, cudaStream_t stream) {
    scale<<<(n + 255) / 256, 256, 0, stream>>>(x, w, out, n, cols);
    if (wait_ns > 0) wait<<<1, 1, 0, stream>>>(wait_ns);
    return cudaGetLastError();
}
"""


def problem(target: Target) -> Problem:
    code = CODE.replace("ROWS", str(ROWS[target]))
    return Problem(
        problem_id=content_id(code),
        code=code,
        ops=("torch.mul", "torch.sin", "F.gelu"),
        data_source="torch#3",
        families=("elementwise",),
        target=target,
        precision=Precision.FP32,
        seed=0,
        index=0,
    )


def solution(target: Target, wait_ns: int) -> Solution:
    kernel = CPU_KERNEL if target is Target.CPU else CUDA_KERNEL
    path = "kernels/work.cpp" if target is Target.CPU else "kernels/work.cu"
    return Solution.of(
        {"model_new.py": MODEL_NEW.replace("WAIT_NS", str(max(0, wait_ns))), path: kernel}
    )


class Lab:
    """One problem's judge, opened up: a solution's stopwatch instead of its verdict."""

    def __init__(self, machine: Machine, one: Problem, admission: Admission) -> None:
        self._machine, self._problem, self._admission = machine, one, admission

    def measure(self, made: Solution, times: int, show: Callable[[], Any]) -> list[Interval]:
        """Speedups over eager from `times` measurements of effort `reward` in one process."""
        record = Draft(
            self._problem, self._admission, made, "reward", self._machine, harness_hash()
        )
        record.build = self._machine.build(made)
        found = []
        with (
            Judge(self._problem, self._admission, self._machine) as judge,
            judge._bench(made, record) as (bench, _),
        ):
            for _ in range(times):
                watch = Stopwatch(bench, self._admission)
                watch.make_rings()
                watch.measure(timing.ROUNDS["reward"], watch_on=True)
                watch.check_timed()
                found.append(timing.speedup(watch.rounds["eager"], watch.rounds["solution"]))
                show()
        return found

    def same(self, times: int, show: Callable[[], Any]) -> list[Interval]:
        """Eager against eager."""
        found = []
        with Judge(self._problem, self._admission, self._machine) as judge:
            reference = judge._ready_reference()
            machine = self._machine
            machine.ask(reference, "make_ring", seed=1)
            machine.ask(reference, "warm_up")
            target = str(machine.target)
            calls = timing.calls_per_round(self._admission.eager_ms or 1.0, target)
            for _ in range(times):
                sides: dict[str, list[list[float]]] = {"one": [], "two": []}
                with machine.lease.exclusive():
                    for index in range(timing.ROUNDS["reward"]):
                        for side in timing.order(list(sides), index):
                            sides[side].append(
                                reference.call("time", machine.timeout_s, side="eager", calls=calls)
                            )
                found.append(timing.speedup(sides["one"], sides["two"]))
                show()
        return found


def calibrated(lab: Lab, target: Target, eager_ms: float, show: Callable[[], Any]) -> int:
    """Nanoseconds to wait for eager's time / GAIN."""
    wait_ns = 0
    for _ in range(CALIBRATIONS):
        found = lab.measure(solution(target, wait_ns), 3, show)
        seen = statistics.median(one.point for one in found)
        wait_ns += round(1e6 * eager_ms * (1 / GAIN - 1 / seen))
    return wait_ns


def run(target: Target, num_same: int, num_gain: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as root:
        machine = open_machine(target, root)
        one = problem(target)
        admission = admit(one, machine, signature, ("mul", "sin", "gelu"))
        if admission.reason is not None or admission.eager_ms is None:
            raise SystemExit(f"aa: the problem is not admitted: {admission.detail}")
        lab = Lab(machine, one, admission)
        total = num_same + num_gain + 3 * CALIBRATIONS
        with tqdm(total=total, unit="measurement", disable=None) as bar:
            same = lab.same(num_same, bar.update)
            wait_ns = calibrated(lab, target, admission.eager_ms, bar.update)
            gain = lab.measure(solution(target, wait_ns), num_gain, bar.update)
        found = {
            "commit": git_commit(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
            "harness": harness_hash(),
            "environment": to_json(machine.environment),
            "eager_ms": admission.eager_ms,
            "wait_ns": wait_ns,
            "threshold": THRESHOLD,
            "same": to_json(same),
            "gain": to_json(gain),
        }
        machine.close()
    return found


def describe(found: dict[str, Any]) -> str:
    """The table of a run."""
    lines = [f"eager takes {found['eager_ms']:.3f} ms; faster means a ratio above {THRESHOLD:.4f}"]
    for name, truth in (("same", 1.0), ("gain", GAIN)):
        rows = found[name]
        if not rows:
            continue
        faster = sum(row["low"] > THRESHOLD for row in rows)
        points = sorted(row["point"] for row in rows)
        width = statistics.median(row["high"] - row["low"] for row in rows)
        lines.append(
            f"{name}: truth {truth:.2f}, called faster {faster} of {len(rows)}; "
            f"ratios {points[0]:.4f} to {points[-1]:.4f}, median {statistics.median(points):.4f}; "
            f"median width of the interval {width:.4f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--target", choices=[str(t) for t in Target], default="cpu")
    parser.add_argument("--num_same", type=int, default=600)
    parser.add_argument("--num_gain", type=int, default=100)
    parser.add_argument("--json")
    args = parser.parse_args()
    found = run(Target(args.target), args.num_same, args.num_gain)
    print(describe(found))
    if args.json:
        with open(args.json, "w") as out:
            json.dump(found, out)


if __name__ == "__main__":
    main()
