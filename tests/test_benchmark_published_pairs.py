"""Kernels for KernelBench's problems from several sources: which are taken, what they claim."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published import kernelbench_runs, kernelsseum
from benchmarks.published.pairs import Pair, chosen, left_to_torch, with_problems_of
from benchmarks.published.records import Published, PublishedError
from benchmarks.published.table import rightly, row_of, table
from schemas.records import Target
from tests.published_copies import PROBLEM

MODEL = """# __global__ {name}
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.cpp_extension import load_inline

built = load_inline("built", "")


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 5)
        self.weight = nn.Parameter(torch.rand(3))
        self.built = built

    def forward(self, x):
        x = x.contiguous().view(x.size(0), -1)
        return {result}
"""


def code(result: str = "self.built.run(x, self.conv.weight)", name: str = "") -> str:
    return MODEL.format(result=result, name=name)


def pair(name: str, level: int, problem: str, text: str, claimed: float | None = None) -> Pair:
    return Pair(
        name=name, level=level, problem=problem, code=text, problem_code=PROBLEM, claimed=claimed
    )


@pytest.mark.parametrize(
    ("result", "left"),
    [
        ("self.built.run(x, self.conv.weight)", []),
        ("built.run(torch.empty_like(x), x.size(1) * 2)", []),
        ("built.run(self.conv(x))", ["self.conv"]),
        ("built.run(F.relu(x))", ["F.relu"]),
        ("torch.relu(built.run(x))", ["torch.relu"]),
        ("built.run(x).mean(dim=1)", ["built.run(x).mean"]),
        ("built.run(x) @ x", ["@"]),
    ],
)
def test_what_a_model_leaves_to_torch(result: str, left: list[str]) -> None:
    assert left_to_torch(code(result)) == left


@pytest.mark.parametrize("text", ["def", "x = 1\n", ""])
def test_a_text_without_a_model_leaves_nothing(text: str) -> None:
    assert left_to_torch(text) == []


def test_own_work_comes_first_then_what_is_claimed_to_be_faster() -> None:
    torch = "torch.relu(x)"
    found = list(
        chosen([
            pair("fast_torch", 1, "1_a", code(torch), 9.0),
            pair("unclaimed", 1, "1_a", code(name="slow")),
            pair("slow", 1, "1_a", code(name="slow"), 1.0),
            pair("fast", 1, "1_a", code(name="fast"), 2.0),
            pair("same_text", 1, "1_a", code(name="fast"), 3.0),
            pair("no_kernel", 1, "1_a", code().replace("__global__", "")),
            pair("tenth", 1, "10_b", code(name="tenth")),
            pair("second", 1, "2_b", code(name="second")),
            pair("other_level", 2, "1_a", code(name="level")),
            pair("torch", 2, "1_a", code(torch, "torch"), 5.0),
        ])
    )  # fmt: skip
    # Levels in turns, of each problem its first; then the second ones; then what torch works for.
    assert [made.name for made in found] == [
        "fast", "other_level", "second", "tenth", "slow", "torch",
    ]  # fmt: skip
    assert found[0].of == (1, "1_a") and found[0].claimed == 2.0


@pytest.fixture
def leaderboard(tmp_path: Path) -> Path:
    assets = tmp_path / "board" / kernelsseum.ASSETS
    for folder in ("problems", "solutions"):
        (assets / folder).mkdir(parents=True)
    entry: dict[str, Any] = {"display_name": "m", "torch_speedup": 0.5, "file": "abc"}
    (assets / "data.json").write_text(json.dumps({"Level 2: 7_Add_": [entry], "Level 1: 1_A": []}))
    (assets / "problems" / "l2_p7.py").write_text(PROBLEM)
    (assets / "solutions" / "abc.py").write_text(code())
    return tmp_path / "board"


def test_the_leaderboard_has_claims_for_problems_of_its_own(leaderboard: Path) -> None:
    (made,) = kernelsseum.read(leaderboard, Target.CUDA)
    assert (made.name, made.of, made.claimed) == ("m/2/7", (2, "7_Add_"), 0.5)
    assert made.problem_code == PROBLEM


@pytest.mark.parametrize("text", ["{", "[]", '{"Level": [{}]}', '{"Level 1: 1_A": [{}]}'])
def test_another_leaderboard_is_said(leaderboard: Path, text: str) -> None:
    (leaderboard / kernelsseum.ASSETS / "data.json").write_text(text)
    with pytest.raises(PublishedError, match=r"data\.json: expected"):
        list(kernelsseum.read(leaderboard, Target.CUDA))


RIGHT = {"correctness": True, "runtime": 2.0}
PRINTED = """[START] 'run_name': 'mine_l2', 'level': 2
[Eval Result] Problem ID: 7, Sample ID: 0
compiled=True correctness=True metadata={} runtime=2.0 runtime_stats={} ref_runtime=5.0 ref_more={}
[Eval Result] Problem ID: 8, Sample ID: 0
compiled=True correctness=True metadata={} runtime=3.0 runtime_stats={} ref_runtime=5.0 ref_more={}
"""


@pytest.fixture
def fork(tmp_path: Path) -> Path:
    root = tmp_path / "fork"
    run, other = root / "runs" / "mine_l2", root / "runs" / "theirs_level2_2025"
    for folder in (run, other, root / "runs" / "empty", root / "KernelBench" / "level2"):
        folder.mkdir(parents=True)
    for number in (7, 8, 9):
        (root / "KernelBench" / "level2" / f"{number}_P.py").write_text(PROBLEM)
        (run / f"level_2_problem_{number}_sample_0_kernel.py").write_text(code(name=f"{number}"))
        (other / f"problem_{number}_kernel.py").write_text(code(name=f"other {number}"))
    wrong = {"correctness": False, "runtime": -1.0}
    said = {"7": [RIGHT], "8": RIGHT, "9": [wrong], "10": [{**RIGHT, "ref_runtime": 8.0}]}
    (run / "eval_results.json").write_text(json.dumps(said))
    with_reference = {**RIGHT, "ref_runtime": 8.0}
    rows = [{"problem_id": 9, "eval_result": with_reference}, {"problem_id": 8}]
    (other / "detailed_results.json").write_text(json.dumps({"results": rows}))
    (root / "runs" / "empty" / "out.log").write_text(PRINTED)
    return root


def test_runs_have_what_their_evaluation_found_right(fork: Path) -> None:
    found = {made.name: made for made in kernelbench_runs.read(fork, Target.CUDA)}
    # The evaluation that was printed of 8 is another one: it took another time.
    claims = {"mine_l2/2/7": 2.5, "mine_l2/2/8": None, "theirs_level2_2025/2/9": 4.0}
    assert {name: made.claimed for name, made in found.items()} == claims
    assert found["mine_l2/2/7"].of == (2, "7_P") and found["mine_l2/2/7"].problem_code == PROBLEM


@pytest.mark.parametrize("text", ["{", "[]", '{"a": {"correctness": true}}', '{"7": [{"x": 1}]}'])
def test_other_results_are_said(fork: Path, text: str) -> None:
    (fork / "runs" / "mine_l2" / "eval_results.json").write_text(text)
    with pytest.raises(PublishedError, match=r"eval_results\.json: expected"):
        list(kernelbench_runs.read(fork, Target.CUDA))


def test_a_kernel_without_a_problem_or_a_level_is_said(fork: Path) -> None:
    problem = fork / "KernelBench" / "level2" / "7_P.py"
    problem.rename(problem.with_name("77_P.py"))
    with pytest.raises(PublishedError, match=r"expected one file level2/7_\*\.py"):
        list(kernelbench_runs.read(fork, Target.CUDA))
    (fork / "runs" / "theirs_level2_2025").rename(fork / "runs" / "a_theirs")
    with pytest.raises(PublishedError, match="expected the level in the name"):
        list(kernelbench_runs.read(fork, Target.CUDA))


def test_problems_of_another_version_are_found_by_name(fork: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "KernelBench" / "level2"
    other.mkdir(parents=True)
    (other / "7_P.py").write_text(f"{PROBLEM}# torch.matmul\n")
    made = Published(name="a", of=(2, "7_P"), problem_code=PROBLEM)
    lost = Published(name="b", of=(2, "8_P"), problem_code=PROBLEM)
    found = with_problems_of(str(tmp_path / "other"), [made, lost])
    assert found[0].problem_code.endswith("# torch.matmul\n") and found[0].libraries == ("cublas",)
    assert "no problem 8_P" in found[1].why_not
    with pytest.raises(PublishedError, match="does not say which problem"):
        with_problems_of(str(tmp_path / "other"), [Published(name="c")])
    with pytest.raises(PublishedError, match="to be a copy of KernelBench"):
        with_problems_of(str(tmp_path / "none"), [made])


def test_other_names_of_parameters_are_a_matter_of_form() -> None:
    reason = "build_model: RuntimeError: Error(s) in loading state_dict for ModelNew:\n\tMissing"
    keys = "labels effort harness build_s speedup_eager speedup_compile aa_control attribution"
    verdict = {**dict.fromkeys(keys.split()), **dict.fromkeys(("solution", "eager", "compile"))}
    verdict |= {"status": "runtime_error", "reason": reason, "checks": []}
    made = row_of("kernelsseum", Published(name="a", claimed=2.0), {"verdict": verdict})
    assert made["status"] == "other_parameters" and rightly(made) is None
    assert "1  other_parameters" in table([made])
