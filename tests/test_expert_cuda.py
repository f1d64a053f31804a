"""Generated CUDA compiles for every case (nothing runs here), and looks as it should."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kernel_agent.expert.params import PLAIN, Params
from kernel_agent.expert.solution import solution_files
from kernel_agent.expert.variants import variants
from schemas.records import Precision, Target
from tests.expert_cases import CASES, FP32_ONLY, plan_of, problem

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on this machine")


def _cuda(name: str, kind: str, dtype: str = "float32", params: Params = PLAIN) -> str:
    code = problem(name, dtype)
    return solution_files(code, plan_of(code, kind), Target.CUDA, params)["kernels/kernels.cu"]


def _compile(texts: list[str], folder: Path) -> None:
    """Each text in a namespace of its own, so that one compiler run takes them all."""
    includes = sorted(
        {line for text in texts for line in text.split("\n") if line.startswith("#include")}
    )
    bodies = [
        "\n".join(line for line in text.split("\n") if not line.startswith("#include"))
        for text in texts
    ]
    bodies = [body.replace('extern "C" int', "int") for body in bodies]
    parts = [f"namespace case_{k} {{\n{body}\n}}" for k, body in enumerate(bodies)]
    source = folder / "kernels.cu"
    source.write_text("\n".join([*includes, *parts]))
    command = [
        "nvcc",
        "-std=c++17",
        "-arch=sm_90",
        "-O1",
        "-c",
        str(source),
        "-o",
        str(folder / "kernels.o"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:3000]
    assert "warning" not in done.stderr, done.stderr[:3000]


@needs_nvcc
def test_a_few_compile(tmp_path: Path) -> None:
    texts = [
        _cuda("chain", "reference"),
        _cuda("layer_norm", "optimized", "bfloat16"),
        _cuda("cumsum", "optimized"),
    ]
    _compile(texts, tmp_path)


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["reference", "optimized"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_compile(kind: str, dtype: str, tmp_path: Path) -> None:
    names = [n for n in CASES if dtype == "float32" or n not in FP32_ONLY]
    _compile([_cuda(n, kind, dtype) for n in names], tmp_path)


@needs_nvcc
@pytest.mark.slow
def test_all_variants_compile(tmp_path: Path) -> None:
    texts = []
    for name in ("chain", "softmax", "softmax_column", "layer_norm", "cumsum"):
        found = variants(plan_of(problem(name), "optimized"), Target.CUDA)
        texts += [_cuda(name, "optimized", params=params) for params in found]
    _compile(texts, tmp_path)


def test_tf32_is_for_its_own_class_only() -> None:
    code = (
        problem("linear")
        .replace("r(5, 3, 20)", "")
        .replace("5, 3, 20", "64, 64")
        .replace("20, 33", "64, 64")
    )
    plan = plan_of(code, "optimized")
    assert not any(p.options.get("tf32") for p in variants(plan, Target.CUDA, Precision.FP32))
    chosen = [p for p in variants(plan, Target.CUDA, Precision.TF32) if p.options.get("tf32")]
    text = solution_files(code, plan, Target.CUDA, chosen[0])["kernels/kernels.cu"]
    assert "precision::tf32" in text
    assert "wmma" not in solution_files(code, plan, Target.CUDA)["kernels/kernels.cu"]


def test_rows_are_read_once_into_registers() -> None:
    text = _cuda("softmax", "optimized")
    device = text[text.index("__global__") :]
    assert device.count("x[") == 1, "the row is loaded from memory in one pass only"
