"""Composed problems, as the pipeline makes them: a correct solution from both plans."""

from __future__ import annotations

from pathlib import Path

import pytest

from operator_templates.compose import ComposeError, compose
from schemas.records import Target
from tests.expert_cases import run_cpu

QUICK = 4  # the rest takes a minute


def _check(index: int, folder: Path) -> None:
    try:
        problem = compose(11, index, Target.CPU)
    except ComposeError as error:
        pytest.skip(f"no problem at this index: {error}")
    for kind in ("reference", "optimized"):
        assert run_cpu(problem.code, kind, folder) <= 1, (kind, problem.ops)


@pytest.mark.parametrize("index", range(QUICK))
def test_composed(index: int, tmp_path: Path) -> None:
    _check(index, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(QUICK, 30))
def test_composed_more(index: int, tmp_path: Path) -> None:
    _check(index, tmp_path)
