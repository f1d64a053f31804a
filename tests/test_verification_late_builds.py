"""Extensions asked for late: when `ModelNew` is constructed, or first called."""

from __future__ import annotations

import pytest

from schemas.records import Solution
from verification.building.build import BuildError
from verification.machine import Machine

EXTENSION = '''
import torch
from torch.utils.cpp_extension import load_inline

PLAIN = """
#include <Python.h>

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "late", nullptr, -1, nullptr};

PyMODINIT_FUNC PyInit_late() { return PyModule_Create(&definition); }
"""


def ask():
    return load_inline("late", [PLAIN], no_implicit_headers=True)
'''
MODEL = """
class ModelNew(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        assert size == 5
        {in_constructor}

    def forward(self, x, *, more=None):
        assert x.shape == (5, 2)
        {in_forward}
        return x
"""
INPUTS = """
import torch

Model = None


def get_inputs():
    return [torch.rand(5, 2)]

def get_init_inputs():
    return [5]
"""


def solution(in_constructor: str = "pass", in_forward: str = "pass") -> Solution:
    text = EXTENSION + MODEL.format(in_constructor=in_constructor, in_forward=in_forward)
    return Solution.of({"model_new.py": text}, form="load_inline")


@pytest.mark.parametrize("where", ["in_constructor", "in_forward"])
def test_what_is_asked_for_late_is_built(cpu_machine: Machine, where: str) -> None:
    made = cpu_machine.build(solution(**{where: "self.late = ask()"}), (), INPUTS)
    assert len(made.libraries) == 1


def test_what_a_build_leaves_out_is_said(cpu_machine: Machine) -> None:
    """Arithmetic is judged as it is without: what is faster with fast maths is less exact too."""
    ask = "load_inline('late', [PLAIN], no_implicit_headers=True, extra_cflags=['-ffast-math'])"
    assert cpu_machine.build(solution(in_constructor=ask), (), INPUTS).labels == [
        "fast_math_left_out"
    ]
    assert cpu_machine.build(solution(in_constructor="ask()"), (), INPUTS).labels == []


def test_many_layers_may_ask_for_the_same(cpu_machine: Machine) -> None:
    made = cpu_machine.build(solution(in_constructor="[ask() for _ in range(40)]"), (), INPUTS)
    assert len(made.libraries) == 1


def test_a_fallback_after_the_call_changes_nothing(cpu_machine: Machine) -> None:
    """Many published kernels catch every error and let torch compute then."""
    lines = "try: ask().missing()", "except Exception: pass"
    made = cpu_machine.build(solution(in_constructor="\n        ".join(lines)), (), INPUTS)
    assert len(made.libraries) == 1


@pytest.mark.parametrize(
    ("late", "why"),
    [
        (solution(), "imported, constructed or first called, and it called neither"),
        (solution(in_constructor="1 / 0"), r"using model_new\.py: ZeroDivisionError"),
    ],
)
def test_what_asks_for_nothing_is_said(cpu_machine: Machine, late: Solution, why: str) -> None:
    with pytest.raises(BuildError, match=why):
        cpu_machine.build(late, (), INPUTS)


@pytest.mark.parametrize("folder", ["tempfile.mkdtemp()", "'.'", "'deeper'"])
def test_sources_may_be_written_where_the_solution_works(cpu_machine: Machine, folder: str) -> None:
    write = (
        f"folder = {folder}",
        "os.makedirs(folder, exist_ok=True)",
        "file = open(os.path.join(folder, 'late.cpp'), 'w')",
        "file.write(PLAIN)",
        "file.close()",
        "self.late = load('late', [os.path.join(folder, 'late.cpp')])",
    )
    text = "import os\nimport tempfile\nfrom torch.utils.cpp_extension import load\n"
    text += solution("\n        ".join(write)).files[0].text
    made = cpu_machine.build(Solution.of({"model_new.py": text}, form="load_inline"), (), INPUTS)
    assert len(made.libraries) == 1
