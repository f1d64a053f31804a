"""What is read from copies of others' repositories, and how it becomes problems and solutions."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.published import cuda_l1, kernelbench, pygpubench, sol_execbench
from benchmarks.published.records import (
    AUDITS,
    Expect,
    Published,
    PublishedError,
    digest,
    needed_libraries,
)
from schemas.records import Precision, Target
from tests.published_copies import SUBMISSIONS, cuda_l1_row

pytest_plugins = ("tests.published_copies",)


def names(published: list[Published]) -> list[str]:
    return [made.name for made in published]


def test_kernels_of_their_own_each_text_once_and_levels_in_turns(cuda_l1_dir: Path) -> None:
    found = list(cuda_l1.read(cuda_l1_dir, Target.CUDA))
    assert names(found) == [
        "h100/1/1", "h100/2/1", "h100/1/2", "a100/1/1", "a100/1/6", "a100/1/7",
    ]  # fmt: skip
    assert [made.claimed for made in found[:3]] == [2.5, None, 17.0]
    assert [bool(made.why_not) for made in found] == [False] * 4 + [True, True]
    assert "cupy" in found[4].why_not and "SyntaxError" in found[5].why_not
    assert digest(found) != digest(found[:-1])


@pytest.mark.parametrize("line", ["{", "[]", '{"level_id": 1}'])
def test_another_file_is_said_with_its_line(cuda_l1_dir: Path, line: str) -> None:
    (cuda_l1_dir / "optimized_cuda_code" / "h100.json").write_text(
        f"{cuda_l1_row(1, None)}\n{line}"
    )
    with pytest.raises(PublishedError, match="line 2: expected a JSON object with level_id"):
        list(cuda_l1.read(cuda_l1_dir, Target.CUDA))


@pytest.mark.parametrize(
    ("text", "libraries"),
    [
        ("torch.matmul(A, B)", ("cublas",)),
        ("self.fc = nn.Linear(3, 4)", ("cublas",)),
        ("return A @ B", ("cublas",)),
        ("nn.ConvTranspose3d(3, 4, 5)", ("cudnn",)),
        ("F.conv2d(x, w)", ("cudnn",)),
        ("# Convert to a float\ntorch.sum(x)", ()),
    ],
)
def test_libraries_are_those_that_a_problem_needs(text: str, libraries: tuple[str, ...]) -> None:
    assert needed_libraries(text) == libraries


def test_examples_and_attacks(kernelbench_dir: Path) -> None:
    found = {made.name: made for made in kernelbench.read(kernelbench_dir, Target.CUDA)}
    assert list(found) == [
        "model_new_ex_add", "model_new_ex_add_triton", "model_new_ex_lost",
        "few_shot/model_new_ex_2", "zero_kernel", "zero_kernel, audits off",
    ]  # fmt: skip
    assert found["model_new_ex_add"].expect is Expect.HONEST
    assert "written in triton" in found["model_new_ex_add_triton"].why_not
    assert "expected its problem in model_ex_lost.py" in found["model_new_ex_lost"].why_not
    assert "a template" in found["few_shot/model_new_ex_2"].why_not
    attack, off = found["zero_kernel"], found["zero_kernel, audits off"]
    assert attack.expect is off.expect is Expect.EXPLOIT
    assert (attack.off, attack.libraries, off.off, off.libraries) == ((), (), AUDITS, ("cublas",))


def test_submissions_are_wrapped_and_asked_about_twice(pygpubench_dir: Path) -> None:
    found = {made.name: made for made in pygpubench.read(pygpubench_dir, Target.CUDA)}
    assert len(found) == 2 * len(SUBMISSIONS)
    expected = {name.split("_")[1]: made.expect for name, made in found.items() if not made.off}
    assert expected == {"correct": Expect.TORCH, "wrong": Expect.WRONG, "late": Expect.EXPLOIT}
    made = found["submission_late, audits off"]
    assert made.off == AUDITS and made.form == "cabi" and "8192, 8192, 3" in made.problem_code
    assert made.files["model_new.py"].startswith(SUBMISSIONS["late"])
    compile(made.files["model_new.py"], "model_new.py", "exec")
    assert "kernels/copy.cu" in made.files


def test_samples_become_problems_of_their_largest_workload(sol_execbench_dir: Path) -> None:
    found = {made.name: made for made in sol_execbench.read(sol_execbench_dir, Target.CPU)}
    assert [name for name, made in found.items() if made.why_not] == [
        "double/solution_triton", "paged/solution",
    ]  # fmt: skip
    honest = found["double/solution_cuda"]
    assert honest.expect is Expect.HONEST and honest.precision is Precision.BF16
    assert "torch.randn(4096, 8, dtype=torch.bfloat16), 0.5]" in honest.problem_code
    assert sorted(honest.files) == [
        "kernels/kernel.cu", "kernels/kernel.h", "kernels/main.cpp", "model_new.py",
    ]  # fmt: skip
    assert "sources=['kernels/kernel.cu', 'kernels/main.cpp']" in honest.files["model_new.py"]
    assert "return built.go(*inputs)" in honest.files["model_new.py"]
    for name in ("evil_thread", "double/solution_hack_lazy"):
        assert found[name].expect is found[f"{name}, audits off"].expect is Expect.EXPLOIT
    assert found["double/solution_python"].expect is Expect.TORCH
