"""Hand-sized records for tests. Every function makes a valid record; keywords replace fields.

kept = factories.kept(index=3)                    # Problem, Admission, Neighbour that agree
won = factories.verdict(eager=2.0, compile=1.5)   # correct, with these speedups
factories.trajectory(kept, won)                   # two turns: wrong, then `won`
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from schemas.codec import content_id
from schemas.records import (
    Admission,
    AdmitReason,
    Attribution,
    Check,
    DeviceState,
    Environment,
    Interval,
    Isolation,
    Measurement,
    Neighbour,
    Precision,
    Problem,
    Rejection,
    RejectStage,
    Solution,
    StopReason,
    Target,
    ToolCall,
    Trajectory,
    TrajectoryKind,
    Turn,
    Verdict,
    VerdictStatus,
)
from verification.machine import MachineSettings

TOOLS = json.dumps(
    [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": f"{name} a file",
                "parameters": {
                    "type": "object",
                    "properties": {key: {"type": "string"} for key in ("path", "text")},
                    "required": ["path"],
                },
            },
        }
        for name in ("write", "verify")
    ]
)
"""Tool definitions that the calls of `trajectory` fit."""

CODE = '''\
"""Problem {index}: y = relu(x * {index})."""

import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x * {index})


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(64, 64)]


def get_init_inputs() -> list[int]:
    return []
'''


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The three records of a problem that was kept."""

    problem: Problem
    admission: Admission
    neighbour: Neighbour


def environment(**fields: Any) -> Environment:
    defaults: dict[str, Any] = {
        "device": "test device",
        "device_id": "0",
        "driver": None,
        "toolkit": None,
        "compiler": "g++ 12.2.0",
        "torch": "2.13.0",
        "python": "3.11.2",
        "num_threads": 2,
        "platform": "Linux x86_64",
    }
    return Environment(**defaults | fields)


def machine_settings(root: Path, **changes: Any) -> MachineSettings:
    """A CPU machine with everything it keeps below `root`."""
    defaults: dict[str, Any] = {
        "target": Target.CPU,
        "device": "cpu",
        "store": str(root / "store"),
        "cache": str(root / "cache"),
        "lease_log": str(root / "lease.log"),
    }
    return MachineSettings(**defaults | changes)


def problem(index: int = 0, **fields: Any) -> Problem:
    code = fields.pop("code", CODE.format(index=index))
    defaults: dict[str, Any] = {
        "problem_id": content_id(code),
        "code": code,
        "ops": ("torch.mul", "torch.relu"),
        "data_source": "torch#2",
        "families": ("elementwise", "activation"),
        "target": Target.CPU,
        "precision": Precision.FP32,
        "seed": 7,
        "index": index,
    }
    return Problem(**defaults | fields)


def admission(problem_id: str, **fields: Any) -> Admission:
    """An admitted problem: 4 ms eager, 3 ms compiled, 1.5 ms at the roofline, so headroom 2."""
    defaults: dict[str, Any] = {
        "problem_id": problem_id,
        "reason": None,
        "detail": "",
        "operators": ("mul", "relu"),
        "ngrams": ("mul", "relu", "mul relu"),
        "ngrams_attributes": ("mul", "relu", "mul relu"),
        "eager_ms": 4.0,
        "compile_ms": 3.0,
        "roofline_ms": 1.5,
        "headroom": 2.0,
        "min_bytes": 32768,
        "flops": 8192,
        "environment": environment(),
    }
    return Admission(**defaults | fields)


def refused(problem_id: str, reason: AdmitReason = AdmitReason.CONSTANT_OUTPUT) -> Admission:
    """An admission that did not come to timing."""
    times = dict.fromkeys(("eager_ms", "compile_ms", "roofline_ms", "headroom"))
    return admission(problem_id, reason=reason, detail="one value", **times)


def neighbour(problem_id: str, **fields: Any) -> Neighbour:
    defaults: dict[str, Any] = {
        "problem_id": problem_id,
        "cluster_id": f"c-{problem_id}",
        "kernelbench_id": "level1/19_ReLU",
        "kernelbench_similarity": 0.25,
        "near_miss": False,
        "split": "train",
    }
    return Neighbour(**defaults | fields)


def kept(
    index: int = 0,
    *,
    headroom: float = 2.0,
    split: str = "train",
    near_miss: bool = False,
    **fields: Any,
) -> Kept:
    """A problem with the admission and neighbour that go with it; `fields` are the problem's."""
    made = problem(index, **fields)
    return Kept(
        problem=made,
        admission=admission(made.problem_id, headroom=headroom, roofline_ms=3.0 / headroom),
        neighbour=neighbour(made.problem_id, split=split, near_miss=near_miss),
    )


def measurement(median_ms: float = 1.0, **fields: Any) -> Measurement:
    samples = (median_ms * 0.9, median_ms, median_ms * 1.1)
    defaults: dict[str, Any] = {"median_ms": median_ms, "samples_ms": samples, "clock": "wall"}
    return Measurement(**defaults | fields)


def interval(point: float, spread: float = 0.02) -> Interval:
    """`point` and the interval of `spread` times it to each side."""
    return Interval(low=point * (1 - spread), point=point, high=point * (1 + spread))


def check(**fields: Any) -> Check:
    defaults: dict[str, Any] = {
        "name": "natural",
        "distribution": "normal",
        "seed": 0,
        "passed": True,
        "error": 1e-7,
        "budget": 1e-6,
    }
    return Check(**defaults | fields)


def verdict(
    status: VerdictStatus = VerdictStatus.CORRECT,
    *,
    eager: float | Interval = 4.0,
    compile: float | Interval = 3.0,
    **fields: Any,
) -> Verdict:
    """A verdict; a correct one has the given speedups over a solution of 1 ms."""
    timed = status is VerdictStatus.CORRECT
    over = {
        name: value if isinstance(value, Interval) else interval(value)
        for name, value in (("eager", eager), ("compile", compile))
    }
    wrong = status is VerdictStatus.INCORRECT
    defaults: dict[str, Any] = {
        "problem_id": problem().problem_id,
        "solution_id": solution().solution_id,
        "status": status,
        "reason": "" if timed else str(status),
        "effort": "publish",
        "checks": (check(passed=not wrong, error=1.0 if wrong else 1e-7),),
        "solution": measurement(1.0) if timed else None,
        "eager": measurement(over["eager"].point) if timed else None,
        "compile": measurement(over["compile"].point) if timed else None,
        "speedup_eager": over["eager"] if timed else None,
        "speedup_compile": over["compile"] if timed else None,
        "aa_control": interval(1.0) if timed else None,
        "roofline_ms": 0.5 if timed else None,
        "headroom": 2.0 if timed else None,
        "build_s": 0.3,
        "binary_hash": "b" * 16,
        "isolation": Isolation(
            network=True, user=True, limits=True, processes=True, filesystem=True, syscalls=True
        ),
        "labels": ("not_bitwise_repeatable",),
        "processes": 5,
        "attribution": Attribution(knocked_out=2, own_launches=3, own_share=1.0, foreign=()),
        "device_state": DeviceState(
            sm_clock_mhz=1980.0,
            temperature_c=40.0,
            power_w=300.0,
            throttle_reasons=(),
            discarded_rounds=0,
        ),
        "environment": environment(),
        "harness": "1",
    }
    return Verdict(**defaults | fields)


def solution(**files: str) -> Solution:
    """A `cabi` solution; keywords replace texts: `model_new`, `kernel`."""
    python = "import cabi\n\nlib = cabi.load()\n\n\nclass ModelNew: ...\n"
    kernel = 'extern "C" void relu_0(const float* x, float* out, long n, void* stream) {}\n'
    return Solution.of(
        {
            "model_new.py": files.get("model_new", python),
            "kernels/relu.cpp": files.get("kernel", kernel),
        }
    )


def call(name: str = "write", **arguments: str) -> ToolCall:
    return ToolCall(name=name, arguments=json.dumps(arguments or {"path": "model_new.py"}))


def turn(index: int = 0, **fields: Any) -> Turn:
    """One call and its observation; no verdict."""
    defaults: dict[str, Any] = {
        "index": index,
        "thought": f"step {index}",
        "calls": (call(text=str(index), path="model_new.py"),),
        "observations": (f"wrote file {index}",),
        "solution_id": None,
        "verdict": None,
        "layer": None,
        "gain": None,
    }
    return Turn(**defaults | fields)


def trajectory(of: Kept | None = None, best: Verdict | None = None, **fields: Any) -> Trajectory:
    """Two turns: a wrong solution, then `best`; without `best` the second is wrong as well."""
    of = of or kept()
    best = best and replace(best, problem_id=of.problem.problem_id)
    wrong = verdict(VerdictStatus.INCORRECT, problem_id=of.problem.problem_id)
    last = best or wrong
    made = solution()
    turns = (
        turn(0, verdict=wrong, solution_id=made.solution_id),
        turn(1, verdict=last, solution_id=made.solution_id, gain=1.5 if best else None),
    )
    kind = fields.pop("kind", TrajectoryKind.OPTIMIZED)
    defaults: dict[str, Any] = {
        "trajectory_id": content_id(f"{of.problem.problem_id} {kind}"),
        "problem_id": of.problem.problem_id,
        "kind": kind,
        "policy": "scripted",
        "system": "You write kernels.",
        "prompt": f"Make this fast:\n{of.problem.code}",
        "turns": turns,
        "stop_reason": StopReason.SUBMITTED if best else StopReason.NO_CORRECT_SOLUTION,
        "detail": "",
        "solution": made if best else None,
        "verdict": best,
    }
    return Trajectory(**defaults | fields)


def rejection(index: int = 100, **fields: Any) -> Rejection:
    defaults: dict[str, Any] = {
        "problem_id": content_id(str(index)),
        "stage": RejectStage.ADMIT,
        "reason": str(AdmitReason.CONSTANT_OUTPUT),
        "detail": "one value",
        "kind": None,
        "index": index,
    }
    return Rejection(**defaults | fields)
