"""Copies of others' repositories, made here: the structure of the real ones, text of our own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published import kernelbench, sol_execbench

PROBLEM = """
import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return x * 3 + 1


def get_inputs():
    return [torch.rand(1 << 21)]


def get_init_inputs():
    return []
"""
# The words that are looked for stand in a comment: on a CPU there is no such function.
NEW = '''
import torch
from torch.utils.cpp_extension import load_inline

SOURCE = """
#include <Python.h>
// as a __global__ function would
static PyObject* run(PyObject*, PyObject* given) {
    Py_ssize_t from, to, size;
    if (!PyArg_ParseTuple(given, "nnn", &from, &to, &size)) return nullptr;
    const float* x = (const float*)from;
    float* y = (float*)to;
    for (Py_ssize_t i = 0; i < size; ++i) y[i] = x[i] * 3.0f + ADDED;
    Py_RETURN_NONE;
}
static PyMethodDef methods[] = {{"run", run, METH_VARARGS, ""}, {}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "plain", "", -1, methods};
PyMODINIT_FUNC PyInit_plain() { return PyModule_Create(&module); }
"""
plain = load_inline("plain", SOURCE, no_implicit_headers=True, extra_cflags=["-O3"])


class ModelNew(torch.nn.Module):
    def forward(self, x):
        out = torch.empty_like(x)
        plain.run(x.data_ptr(), out.data_ptr(), x.numel())
        return out
'''
HONEST, WRONG = NEW.replace("ADDED", "1.0f"), NEW.replace("ADDED", "1.5f")


def cuda_l1_row(task: int, code: str | None, level: int = 1, score: Any = 2.5) -> str:
    row = {"level_id": level, "task_id": task, "ref_code": PROBLEM, "custom_code": code}
    return json.dumps({**row, "score_default": score, "cuda_graph_code": "left aside"})


@pytest.fixture
def cuda_l1_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "CUDA-L1" / "optimized_cuda_code"
    folder.mkdir(parents=True)
    kernels = [cuda_l1_row(1, HONEST), cuda_l1_row(2, WRONG, score=17), cuda_l1_row(3, None)]
    torch_only = cuda_l1_row(4, "import torch\n")
    higher = cuda_l1_row(1, f"{HONEST}# two\n", level=2, score=None)
    (folder / "h100.json").write_text("\n".join([*kernels, torch_only, higher, ""]))
    again = [cuda_l1_row(1, HONEST), cuda_l1_row(1, f"{HONEST}# other\n")]
    unbuilt = [cuda_l1_row(6, "import cupy # __global__"), cuda_l1_row(7, "__global__ void")]
    (folder / "a100.json").write_text("\n".join([*again, *unbuilt]))
    return folder.parent


@pytest.fixture
def kernelbench_dir(tmp_path: Path) -> Path:
    root = tmp_path / "KernelBench"
    prompts, tests = root / kernelbench.PROMPTS, root / kernelbench.TESTS
    for folder in (prompts / "few_shot", tests / "test_kernels", root / "KernelBench" / "level1"):
        folder.mkdir(parents=True)
    (prompts / "model_ex_add.py").write_text(PROBLEM)
    (prompts / "model_new_ex_add.py").write_text(HONEST)
    (prompts / "model_new_ex_add_triton.py").write_text("import triton\n")
    (prompts / "model_new_ex_lost.py").write_text(HONEST)
    (prompts / "few_shot" / "model_ex_2.py").write_text("x = ...<some operator>...\n")
    (prompts / "few_shot" / "model_new_ex_2.py").write_text(HONEST)
    (root / "KernelBench" / "level1" / "1_product.py").write_text(
        PROBLEM.replace("x * 3 + 1", "x @ x")
    )
    (tests / "test_kernels" / "zero_kernel.py").write_text(WRONG)
    (tests / "test_eval_adversarial.py").write_text(
        "def run_test_kernel(problem_name, kernel_filename): ...\n"
        'run_test_kernel(problem_name="level1/1_product.py", kernel_filename="zero_kernel.py")\n'
    )
    return root


GREY = "(x * x.new_tensor([0.2989, 0.5870, 0.1140])).sum(-1)"
SUBMISSIONS = {
    "correct": f"def kernel(output, x):\n    output.copy_({GREY})\n",
    "wrong": "def kernel(output, x):\n    output.zero_()\n",
    "late": "calls = 0\n\n\ndef kernel(output, x):\n    global calls\n    calls += 1\n"
    f"    if calls < 3:\n        output.copy_({GREY})\n",
}


@pytest.fixture
def pygpubench_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "pygpubench" / "exploits"
    folder.mkdir(parents=True)
    for name, text in SUBMISSIONS.items():
        (folder / f"submission_{name}.py").write_text(text)
    (folder / "benchmark.py").write_text("left aside")
    return folder.parent


def solution_json(languages: list[str], sources: dict[str, str], entry: str) -> str:
    listed = [{"path": path, "content": text} for path, text in sources.items()]
    return json.dumps({"spec": {"languages": languages, "entry_point": entry}, "sources": listed})


@pytest.fixture
def sol_execbench_dir(tmp_path: Path) -> Path:
    root = tmp_path / "sol"
    samples, hacks = root / sol_execbench.SAMPLES, root / sol_execbench.HACKS / "double"
    for folder in (samples / "evil_thread", samples / "double", samples / "paged", hacks):
        folder.mkdir(parents=True)
    (samples / "evil_thread" / "kernel.py").write_text("def run(x, y):\n    return x + y\n")
    definition = {
        "axes": {"n": {"type": "var"}, "width": {"type": "const", "value": 8}},
        "inputs": {
            "x": {"shape": ["n", "width"], "dtype": "bfloat16"},
            "factor": {"shape": None, "dtype": "float32"},
        },
        "reference": "import torch\ndef run(x, factor):\n    return x * factor",
    }
    inputs = {"x": {"type": "random"}, "factor": {"type": "scalar", "value": 0.5}}
    loads = [{"axes": {"n": size}, "inputs": inputs} for size in (4, 4096, 16)]
    paged = {**inputs, "x": {"type": "safetensors"}}
    for name, lines in (("double", loads), ("paged", [{"axes": {"n": 4}, "inputs": paged}])):
        (samples / name / "definition.json").write_text(json.dumps(definition))
        (samples / name / "workload.jsonl").write_text("\n".join(map(json.dumps, lines)))
    python = solution_json(
        ["pytorch"], {"kernel.py": "def run(x, f): return x * f"}, "kernel.py::run"
    )
    cuda = {"kernel.h": "", "kernel.cu": "//", "main.cpp": "//"}
    (samples / "double" / "solution_python.json").write_text(python)
    (samples / "double" / "solution_cuda.json").write_text(
        solution_json(["cuda_cpp"], cuda, "main.cpp::go")
    )
    (samples / "double" / "solution_triton.json").write_text(solution_json(["triton"], {}, "k::f"))
    (samples / "paged" / "solution.json").write_text(python)
    (hacks / "solution_hack_lazy.json").write_text(python)
    return root
