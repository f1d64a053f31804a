"""Mutants, tricks and slowed solutions: what an edit changes, and that the result builds."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from benchmarks.efforts.composed import RATIOS, TORCH, ComposedGroup
from benchmarks.efforts.edits import MUTANTS, Text, slowed
from benchmarks.efforts.entries import Skip
from benchmarks.efforts.tricks import TRICKS
from schemas.records import Target, VerdictStatus
from tests import factories
from tests.expert_cases import GXX, plan_of

CPU_INDICES = (2, 8)
"""Of composed problems: few mutants fit the first one, all of them the second."""

MODEL = """import cabi
import torch
import torch.nn as nn

lib = cabi.load()


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x, y):
        x = x.contiguous()
        out_1 = torch.empty((4,), dtype=torch.float32, device=x.device)
        lib.add(x, self.weight, out_1)
        return out_1
"""
CPU_KERNELS = """#include <cmath>

template <typename T> static inline T nan_max(T a, T b) { return (a > b || a != a) ? a : b; }

extern "C" int add(const float* x, const float* weight, float* out_1, void* stream) {
    #pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < 4; ++i) {
        double row_sum_total = 0.0;
        for (int64_t r = 0; r < 8; ++r) {
            row_sum_total += x[i] * 2.0f;
        }
        out_1[i] = nan_max((float)row_sum_total, 0.0f);
    }
    return 0;
}
"""
CUDA_KERNELS = """#include <cmath>

template <typename T> __device__ T nan_max(T a, T b) { return (a > b || a != a) ? a : b; }

__global__ void add_device(const float* x, const float* weight, float* out_1) {
    __syncthreads();
    for (int unit = threadIdx.x; unit < 72; unit += 32) { out_1_out.v[e] = expf(x[unit]) * 2.0f; }
    out_1[i * 4] = expf(2.0f);
}

extern "C" int add(const float* x, const float* weight, float* out_1, void* stream) {
    add_device<<<10, 256, 0, (cudaStream_t)stream>>>(x, weight, out_1);
    return launched();
}
"""
TEXTS = {
    Target.CPU: Text(target=Target.CPU, model=MODEL, kernels=CPU_KERNELS),
    Target.CUDA: Text(target=Target.CUDA, model=MODEL, kernels=CUDA_KERNELS),
}
CHANGES = {
    ("cpu", "wrong_constant"): ("2.0f", "2.100000000e+00f"),
    ("cpu", "slightly_wrong_constant"): ("2.0f", "2.001000000e+00f"),
    ("cpu", "last_rows_left_out"): ("i < 4;", "i < 3;"),
    ("cpu", "off_by_one"): ("r < 8;", "r < 7;"),
    ("cpu", "nan_lost"): (" || a != a", ""),
    ("cpu", "less_precise"): ("double row_sum_total", "float row_sum_total"),
    ("cpu", "race"): (
        "double row_sum_total = 0.0;",
        "static double row_sum_total;\n        row_sum_total = 0.0;",
    ),
    ("cpu", "one_in_many"): (
        "= nan_max((float)row_sum_total, 0.0f);",
        "= ((i) % 100003 == 5) ? 0.0f : (nan_max((float)row_sum_total, 0.0f));",
    ),
    ("cuda", "last_rows_left_out"): ("<<<10,", "<<<9,"),
    ("cuda", "off_by_one"): ("unit < 72", "unit < 71"),
    ("cuda", "nan_lost"): (" || a != a", ""),
    ("cuda", "less_precise"): ("expf(", "__expf("),
    ("cuda", "race"): ("    __syncthreads();\n", ""),
    ("cuda", "one_in_many"): (
        "out_1[i * 4] = expf(2.0f)",
        "out_1[i * 4] = ((i * 4) % 100003 == 5) ? 0.0f : (expf(2.0f))",
    ),
}


def opened(target: Target, index: int) -> ComposedGroup:
    """A composed problem with its plans, made in this process."""
    group = ComposedGroup.of(target, 0, index)
    code = group.problem.code
    group.opened(plan_of(code, "optimized"), plan_of(code, "reference"))
    return group


@pytest.mark.parametrize("change", CHANGES.items(), ids=lambda c: " ".join(c[0]))
def test_an_edit_changes_what_it_says(change: tuple[tuple[str, str], tuple[str, str]]) -> None:
    (target, name), (old, new) = change
    text = TEXTS[Target(target)]
    made = MUTANTS[name](text, Random(0))
    assert made == text.with_kernels(text.kernels.replace(old, new))


@pytest.mark.parametrize("target", Target)
def test_rounding_keeps_the_upper_half(target: Target) -> None:
    made = MUTANTS["rounded_to_bf16"](TEXTS[target], Random(0))
    assert made is not None
    kernels = Text.of(made, target).kernels
    assert kernels.count("= rounded(") == (1 if target is Target.CPU else 2)
    assert ("static inline __device__ float rounded" in kernels) == (target is Target.CUDA)
    assert kernels.startswith("#include <cmath>\n")


def test_edits_say_where_they_do_not_fit() -> None:
    bare = Text(
        target=Target.CPU,
        model=MODEL.replace("float32", "bfloat16").replace("self.weight, ", ""),
        kernels='extern "C" int add(void* stream) {\n    return 0;\n}\n',
    )
    assert [name for name, edit in MUTANTS.items() if edit(bare, Random(0)) is not None] == []
    assert TRICKS["parameters_kept"](bare, Random(0)) is None


@pytest.mark.parametrize("target", Target)
def test_the_wait_comes_after_the_last_kernel(target: Target) -> None:
    made = Text.of(slowed(TEXTS[target], 1500), target)
    assert made.model == MODEL
    assert re.search(r"    wait_ns\(1500ll, stream\);\n    return ", made.kernels)
    assert made.kernels.count("wait_ns(1500ll") == 1


def run_trick(name: str, calls: int) -> list[tuple[int, float]]:
    """(address, value) of the output of every call, with a library that adds; x is 0, 1, 2 …"""
    made = TRICKS[name](TEXTS[Target.CPU], Random(0))
    assert made is not None
    library = types.SimpleNamespace(add=lambda x, w, out: out.copy_(x + w))
    fake = types.ModuleType("cabi")
    fake.load = lambda: library  # type: ignore[attr-defined]
    names: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cabi", fake)
        exec(made["model_new.py"], names)
    model, x, kept, found = names["ModelNew"](), torch.zeros(4), [], []
    with torch.no_grad():
        for call in range(calls):
            x.data.fill_(float(call))  # without torch's noticing
            if call == 2:
                model.weight.data.fill_(5.0)
            kept.append(model(x, x))
            found.append((kept[-1].data_ptr(), float(kept[-1][0])))
    return found


def test_tricks_do_what_they_say() -> None:
    honest = [1.0, 2.0, *(5.0 + call for call in range(2, 9))]
    values = {name: [value for _, value in run_trick(name, 9)] for name in TRICKS}
    assert values["remembered"] == [1.0] * 9
    assert values["honest_for_five_calls"] == honest[:5] + [honest[4]] * 4
    assert values["one_call_in_eight_left_out"] == [*honest[:7], honest[6], honest[8]]
    assert values["parameters_kept"] == [1.0 + call for call in range(9)]
    assert values["one_output"] == honest
    assert len({address for address, _ in run_trick("one_output", 9)}) == 1


@pytest.mark.parametrize("index", CPU_INDICES)
def test_solutions_of_a_composed_problem_differ_and_build(index: int, tmp_path: Path) -> None:
    group = opened(Target.CPU, index)
    made: dict[str, dict[str, str]] = {"slowed": slowed(group.text, 1000)}
    for entry in group.entries:
        slot = entry.id.rsplit("/", 1)[1]
        try:
            made[slot] = made.get(slot) or group.files(slot)
        except Skip:
            assert slot == "variant"
    texts = [json.dumps(files, sort_keys=True) for files in made.values()]
    assert len(texts) == len(set(texts)) >= 7
    assert {group.what(f"mutant {k}") for k in (1, 2, 3)} < set(MUTANTS)
    assert group.what("trick") in {*TRICKS, TORCH}
    for number, files in enumerate(made.values()):
        source = tmp_path / f"{number}.cpp"
        source.write_text(files["kernels/kernels.cpp"])
        done = subprocess.run(
            [*GXX, "-fsyntax-only", str(source)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[:2000]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here")
@pytest.mark.parametrize("index", (3, 4, 9))
def test_mutants_for_a_gpu_build(index: int, tmp_path: Path) -> None:
    group = opened(Target.CUDA, index)
    made = [*group.mutants(), ("slowed", slowed(group.text, 1000))]
    assert len(made) >= 4
    for name, files in made:
        source = tmp_path / f"{name}.cu"
        source.write_text(files["kernels/kernels.cu"])
        command = [
            "nvcc",
            "-std=c++17",
            "-arch=sm_90",
            "-ptx",
            "-o",
            str(tmp_path / "x"),
            str(source),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (name, done.stderr[:2000])


def test_the_first_problems_use_every_mutant_and_trick() -> None:
    every = [opened(Target.CPU, index) for index in range(9)]
    slots = ("mutant 1", "mutant 2", "mutant 3")
    assert {group.what(slot) for group in every for slot in slots} == set(MUTANTS)
    assert {group.what("trick") for group in every} == {*TRICKS, TORCH}


def test_how_long_a_slowed_solution_waits() -> None:
    group = opened(Target.CPU, 1)
    plain = factories.verdict(eager=4.0, compile=2.0)
    assert plain.solution and plain.compile
    wait = plain.compile.median_ms / RATIOS[1] - plain.solution.median_ms
    assert f"wait_ns({round(wait * 1e6)}ll" in group.slowed(plain)["kernels/kernels.cpp"]
    with pytest.raises(Skip, match=r"not 1\.1 times as fast"):
        group.slowed(factories.verdict(eager=0.5, compile=0.5))
    with pytest.raises(Skip, match="no times: incorrect"):
        group.slowed(factories.verdict(status=VerdictStatus.INCORRECT))
