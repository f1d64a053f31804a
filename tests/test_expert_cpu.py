"""Every operator family end to end on the CPU: trace, plan, print, compile, run, compare with
fp64."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_agent.expert.ir import Unsupported
from kernel_agent.expert.variants import variants
from schemas.records import Target
from tests.expert_cases import CASES, FP32_ONLY, plan_of, problem, run_cpu


@pytest.mark.parametrize("kind", ["reference", "optimized"])
@pytest.mark.parametrize("name", CASES)
def test_solution_is_as_exact_as_eager(name: str, kind: str, tmp_path: Path) -> None:
    assert run_cpu(problem(name), kind, tmp_path) <= 1


@pytest.mark.parametrize("name", sorted(set(CASES) - FP32_ONLY)[::3])
def test_bfloat16(name: str, tmp_path: Path) -> None:
    assert run_cpu(problem(name, "bfloat16"), "optimized", tmp_path) <= 1


@pytest.mark.parametrize("name", ["softmax", "softmax_column", "layer_norm", "group_norm"])
def test_every_variant_is_correct(name: str, tmp_path: Path) -> None:
    for params in variants(plan_of(problem(name), "optimized"), Target.CPU):
        assert params.why
        assert run_cpu(problem(name), "optimized", tmp_path, params) <= 1


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("chain", 1),
        ("softmax", 1),
        ("softmax_column", 1),
        ("layer_norm", 1),
        ("group_norm", 1),
        ("conv2d", 1),
        ("linear", 1),
    ],
)
def test_fused_into_one_kernel(name: str, kernels: int) -> None:
    assert len(plan_of(problem(name), "optimized").kernels) == kernels
    assert len(plan_of(problem(name), "reference").kernels) > kernels


def test_long_reduction_is_split_so_that_it_runs_in_parallel() -> None:
    plan = plan_of(problem("split_sum"), "optimized")
    first = plan.kernels[0]
    assert getattr(first, "outer", ()), "the first half has no parallel loop"
    assert any(name.endswith("_parts") for name in plan.buffers)


def test_unsupported_names_the_operator() -> None:
    code = problem("sum").replace("x.sum()", "x.sort(-1)[0]")
    with pytest.raises(Unsupported, match="sort"):
        plan_of(code, "reference")


def test_describe_states_the_bytes_of_the_problem() -> None:
    notes = plan_of(problem("softmax"), "optimized").describe()
    assert "1 kernel(s), 0.00 MB moved" in notes[0]  # 2 * 5 * 77 * 4 bytes
    assert "3 pass(es) over rows of 77" in notes[1]
