"""KernelBench's own kernels: the examples of its prompts, and those that attack its evaluator."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.published.cuda_l1 import why_not
from benchmarks.published.records import (
    AUDITS,
    Expect,
    Published,
    PublishedError,
    Suite,
    needed_libraries,
    one_file,
    text_of,
)
from schemas.records import Target

PROMPTS = Path("src/kernelbench/prompts")
TESTS = Path("src/kernelbench/unit_tests")
ATTACKS = TESTS / "test_eval_adversarial.py"
PROBLEMS = Path("KernelBench")
NEW, OLD = "model_new_ex_", "model_ex_"
LANGUAGES = ("cute", "hip", "thunderkittens", "tilelang", "triton")
"""At the end of a name: what an example is written in."""


def read(root: Path, target: Target) -> Iterator[Published]:
    """Raises PublishedError."""
    for folder in (root / PROMPTS, root / PROMPTS / "few_shot"):
        for file in sorted(folder.glob(f"{NEW}*.py")):
            yield _example(root, file)
    for problem, kernel in _attacks(root / ATTACKS):
        yield from _attack(root, problem, kernel)


def _example(root: Path, file: Path) -> Published:
    name = file.relative_to(root / PROMPTS).with_suffix("").as_posix()
    of = file.stem.removeprefix(NEW)
    language = next((word for word in LANGUAGES if of.endswith(f"_{word}")), None)
    problem = file.with_name(f"{OLD}{of}.py")
    if language:
        return Published(name=name, why_not=f"written in {language}, for which there is no form")
    if not problem.is_file():
        return Published(name=name, why_not=f"expected its problem in {problem.name}, found none")
    code, asked = text_of(file), text_of(problem)
    if unusable := why_not(code) or _no_module(asked):
        return Published(name=name, why_not=unusable)
    return Published(
        name=name, problem_code=asked, files=one_file(code), expect=Expect.HONEST,
        libraries=needed_libraries(asked),
    )  # fmt: skip


def _no_module(problem: str) -> str:
    try:
        names = {getattr(node, "name", "") for node in ast.parse(problem).body}
    except SyntaxError:
        return "its problem is not a Python module: a template"
    return "" if "Model" in names else "its problem has no Model"


def _attacks(file: Path) -> list[tuple[str, str]]:
    """The calls of `run_test_kernel`: a problem, and the kernel that attacks with it."""
    found = []
    try:
        tree = ast.parse(text_of(file))
    except SyntaxError as error:
        raise PublishedError(f"{file}: expected a Python module, got {error}") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "run_test_kernel":
            said = {
                k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)
            }
            if "problem_name" in said and "kernel_filename" in said:
                found.append((str(said["problem_name"]), str(said["kernel_filename"])))
    return found


def _attack(root: Path, problem: str, kernel: str) -> Iterator[Published]:
    asked, code = (
        text_of(root / PROBLEMS / problem),
        text_of(root / TESTS / "test_kernels" / kernel),
    )
    made = Published(
        name=kernel.removesuffix(".py"), problem_code=asked, files=one_file(code),
        expect=Expect.EXPLOIT,
    )  # fmt: skip
    yield made
    # One calls cuBLAS: with that allowed, what is left of it is its trick.
    allowed = needed_libraries(asked)
    yield replace(made, name=f"{made.name}, audits off", off=AUDITS, libraries=allowed)


SUITE = Suite(
    url="github.com/ScalingIntelligence/KernelBench", marker=str(ATTACKS), read=read,
    accept_problem=True,
)  # fmt: skip
