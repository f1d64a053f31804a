"""A cabi solution in the other forms: the text, and that it builds and computes the same."""

from __future__ import annotations

import ast
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import cpp_extension

from kernel_agent.expert.solution import solution_files
from kernel_agent.printers import PrintError, as_load_inline, as_paper, launchers
from schemas.records import Solution, Target
from tests import samples
from tests.expert_cases import CASES, plan_of, problem
from verification.building.build import build
from verification.building.plans import PAPER
from verification.building.toolchain import toolchain
from verification.workers import forms

Printer = Callable[[Solution, Target], Solution]
KERNEL = """#include "helper.h"
// extern "C" int not_one(const float* x, void* stream) {
extern "C" int scale(
    const __nv_bfloat16* __restrict__ x, float *out,  // two
    std::int64_t n, int rows, bool flag, double factor, void*
) {
    return helper(n);
}
extern "C" int other(cudaStream_t stream) { return 0; }
static int hidden(int a) { return a; }
"""
MODEL = """import cabi
import torch

kernels = cabi.load()
"""


def _solution(kernel: str = KERNEL, model: str = MODEL) -> Solution:
    helper = "#pragma once\nstatic int helper(long n) { return n != 0; }\n"
    files = {"model_new.py": model, "kernels/scale.cu": kernel, "kernels/helper.h": helper}
    return Solution.of(files)


def _expert(name: str, target: Target, kind: str = "optimized") -> Solution:
    code = problem(name)
    return Solution.of(solution_files(code, plan_of(code, kind), target))


def test_signatures_are_read() -> None:
    scale, other = launchers(KERNEL)
    assert [(p.name, p.kind, p.type) for p in scale.parameters] == [
        ("x", "tensor", "const __nv_bfloat16*"),
        ("out", "tensor", "float*"),
        ("n", "integer", "int64_t"),
        ("rows", "integer", "int"),
        ("flag", "integer", "bool"),
        ("factor", "double", "double"),
    ]
    assert (other.name, other.parameters) == ("other", ())


@pytest.mark.parametrize(
    ("kernel", "why"),
    [
        ('extern "C" int f(float x, void* stream) {', "pointers, int64_t or double, got 'float x'"),
        ('extern "C" int f(const float* x) {', "take a stream last"),
        ("int f(void*) {", "found none"),
    ],
)
def test_what_cannot_be_printed_is_said(kernel: str, why: str) -> None:
    for printed in (as_load_inline, as_paper):
        with pytest.raises(PrintError, match=why):
            printed(_solution(kernel), Target.CUDA)


def test_other_ways_to_load_are_said() -> None:
    with pytest.raises(PrintError, match="got 1 and 0"):
        as_paper(_solution(model="import cabi\nx = [cabi.load()]\n"), Target.CUDA)
    with pytest.raises(PrintError, match="form cabi"):
        as_paper(as_paper(_solution(), Target.CUDA), Target.CUDA)


def test_one_file_holds_everything() -> None:
    made = as_load_inline(_solution(), Target.CUDA)
    assert (made.form, [f.path for f in made.files]) == ("load_inline", ["model_new.py"])
    text = made.text("model_new.py")
    ast.parse(text)
    assert '#include "helper.h"' not in text
    assert "static int helper(long n)" in text
    assert "cabi" not in text
    assert "kernels = load_inline(\n" in text
    assert (
        'extern "C" int scale(void* x, void* out, int64_t n, int rows, bool flag, double factor, '
        "cudaStream_t stream);"
    ) in text


def test_a_text_that_ends_a_literal_is_quoted_otherwise() -> None:
    text = as_load_inline(_solution(KERNEL + "// '''\\\n"), Target.CUDA).text("model_new.py")
    values: dict[str, str] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            values[ast.unparse(node.targets[0])] = str(node.value.value)
    assert values["CUDA_SOURCE"].endswith("// '''\\\n")


def test_the_papers_layout() -> None:
    made = as_paper(_solution(), Target.CUDA)
    assert [f.path for f in made.files] == [
        "kernels/helper.h",
        "kernels/scale.cu",
        "kernels/scale_binding.cpp",
        "model_new.py",
    ]
    assert "double factor, int config, cudaStream_t stream) {" in " ".join(
        made.text("kernels/scale.cu").split()
    ).replace(" )", ")")
    assert "int other(int config, cudaStream_t stream) { return 0; }" in made.text(
        "kernels/scale.cu"
    )
    assert "REGISTER_BINDING(scale, register_scale);" in made.text("kernels/scale_binding.cpp")
    assert made.text("model_new.py").endswith("kernels = cuda_extension\n")


@pytest.mark.parametrize("target", list(Target))
@pytest.mark.parametrize("kind", ["reference", "optimized"])
def test_whatever_the_expert_writes_can_be_printed(target: Target, kind: str) -> None:
    for name in sorted(CASES)[::8]:
        made = _expert(name, target, kind)
        count = len(plan_of(problem(name), kind).kernels)
        inline, paper = as_load_inline(made, target), as_paper(made, target)
        assert inline.text("model_new.py").count("    m.def(") == count
        ast.parse(inline.text("model_new.py"))
        assert paper.text("kernels/kernels_binding.cpp").count("    m.def(") == count


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("load", "load_inline", "_jit_compile"):
        monkeypatch.setattr(cpp_extension, name, getattr(cpp_extension, name))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("model_new", PAPER):
        monkeypatch.setitem(sys.modules, name, sys)
        del sys.modules[name]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("printed", [as_load_inline, as_paper])
def test_a_printed_solution_computes_the_same(printed: Printer, tmp_path: Path) -> None:
    code = samples.CODE.replace("4099, 1024", "7, 33")
    solution = Solution.of(solution_files(code, plan_of(code, "optimized"), Target.CPU))
    made = printed(solution, Target.CPU)
    for source in made.files:
        file = tmp_path / source.path
        file.parent.mkdir(exist_ok=True)
        file.write_text(source.text)
    recorded = json.loads(json.dumps(forms.record(tmp_path))) if made.form == "load_inline" else []
    cache = tmp_path / "cache"
    cache.mkdir()
    built = build(
        made, Target.CPU, toolchain(Target.CPU), cache, 800, 16, recorded=recorded
    )  # fmt: skip
    libraries = {library.key: str(library.path) for library in built.libraries}
    module = forms.import_model(made.form, tmp_path, libraries)
    given: dict[str, Any] = {}
    exec(code, given)
    reference = given["Model"](33)
    model = module.ModelNew(33)
    model.load_state_dict(reference.state_dict())
    x = torch.randn(7, 33)
    torch.testing.assert_close(model(x), reference(x))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("untouched")
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here")
def test_a_printed_cuda_solution_compiles(tmp_path: Path) -> None:
    """Without a GPU it cannot be loaded; the kernels need none of torch's headers."""
    code = problem("layer_norm", "bfloat16")
    solution = Solution.of(solution_files(code, plan_of(code, "optimized"), Target.CUDA))
    tools = toolchain(Target.CUDA, "90")
    paper = as_paper(solution, Target.CUDA)
    assert build(paper, Target.CUDA, tools, tmp_path, 800, 16).libraries
    inline = as_load_inline(solution, Target.CUDA)
    (tmp_path / "model_new.py").write_text(inline.text("model_new.py"))
    recorded = forms.record(tmp_path)
    made = build(inline, Target.CUDA, tools, tmp_path, 800, 16, recorded=recorded)
    assert len(made.libraries[0].objects) == 2
