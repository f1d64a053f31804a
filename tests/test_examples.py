"""The sample of a real GPU run under examples/ is what the code of today says a dataset is."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest

from operator_templates.compose import compose
from schemas.arrow import SCHEMAS, splits_of
from schemas.codec import content_id
from schemas.records import Solution, Target
from training_export import read
from training_export.sample import MAX_BYTES, main
from verification.building.build import build
from verification.building.toolchain import toolchain

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "h200"
RUN = json.loads((EXAMPLE / "run.json").read_text())
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on this machine")


def rows(config: str) -> list[dict[str, Any]]:
    return read.rows(str(EXAMPLE), config, SCHEMAS[config].names)


def test_it_is_small_and_says_nothing_of_the_machine_but_its_kind() -> None:
    files = list(EXAMPLE.rglob("*.parquet"))
    assert sum(file.stat().st_size for file in files) <= MAX_BYTES
    assert len(files) == sum(len(splits_of(config)) for config in SCHEMAS)
    text = (EXAMPLE / "run.json").read_text() + json.dumps(rows("problems"))
    assert not re.findall(r"[0-9a-f]{8}-[0-9a-f]{4}-|\"/[a-z]", text)
    assert RUN["device"]["device"] == "NVIDIA H200"


@pytest.mark.parametrize("config", SCHEMAS)
def test_a_config_loads_without_script_or_network(config: str, tmp_path: Path) -> None:
    found = datasets.load_dataset(str(EXAMPLE), config, cache_dir=str(tmp_path))
    assert sum(len(split) for split in found.values()) == len(rows(config)) > 0


def test_a_problem_is_composed_again_byte_for_byte() -> None:
    for row in rows("problems"):
        again = compose(row["seed"], row["index"], Target.CUDA)
        assert again.problem_id == row["problem_id"] == content_id(row["code"])
        assert again.code == row["code"]


def test_rows_join_and_a_cluster_stands_on_one_side() -> None:
    sides: dict[str, set[str]] = {}
    for split in splits_of("problems"):
        for row in read.split_rows(str(EXAMPLE), "problems", split, ["cluster_id"]):
            sides.setdefault(row["cluster_id"], set()).add(split)
    assert all(len(side) == 1 for side in sides.values())
    ids = {row["problem_id"] for row in rows("problems")}
    kinds: dict[str, list[str]] = {}
    for row in rows("trajectories"):
        kinds.setdefault(row["problem_id"], []).append(row["kind"])
    assert ids == kinds.keys()
    for config in ("ppo_warmup", "sft", "critic", "rl"):
        assert {row["problem_id"] for row in rows(config)} <= ids


def test_rewards_follow_from_the_times_in_the_row() -> None:
    for row in rows("trajectories"):
        eager, compiled = row["speedup_eager_low"], row["speedup_compile_low"]
        if row["status"] not in ("correct", "unmeasured"):
            assert row["reward"] == -1
        elif eager is None or (eager - 1) / eager <= 0.05:
            assert row["reward"] == 1
        else:
            assert row["reward"] == (2 if (compiled - 1) / compiled <= 0.05 else 3)
        if row["speedup_eager"] is not None:  # a median of ratios and a ratio of medians
            ratio = row["eager_median_ms"] / row["solution_median_ms"]
            assert row["speedup_eager"] == pytest.approx(ratio, rel=0.15)
    assert any(row["reward"] == 3 for row in rows("trajectories"))


def test_what_the_agent_says_about_time_a_tool_has_said() -> None:
    quoted = 0
    for row in rows("trajectories"):
        heard = ""
        for message in row["messages"]:
            text = message["content"] or ""
            if message["role"] == "assistant":
                for figure in re.findall(r"\d+\.\d+ ms", text):
                    assert figure in heard
                    quoted += 1
            elif message["role"] == "tool":
                heard += text
    assert quoted > 10


@needs_nvcc
def test_the_fastest_solutions_still_build(tmp_path: Path) -> None:
    best = sorted(rows("trajectories"), key=lambda row: row["speedup_compile"] or 0.0)[-2:]
    for row in best:
        files = {file["path"]: file["text"] for file in row["solution"]["files"]}
        solution = Solution.of(files)
        assert solution.solution_id == row["solution"]["solution_id"]
        assert build(
            solution, Target.CUDA, toolchain(Target.CUDA, "90"), tmp_path, 120, 16
        ).binary_hash


def test_a_sample_of_the_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main([str(EXAMPLE), str(out), "--num_problems=3"]) == 0
    chosen = {row["problem_id"] for row in read.rows(str(out), "problems", ["problem_id"])}
    assert len(chosen) == 3
    assert len(read.rows(str(out), "trajectories", ["kind"])) == 6
    assert json.loads((out / "run.json").read_text()) == RUN
    assert main([str(EXAMPLE), str(out)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert main([str(EXAMPLE), str(tmp_path / "more"), "--num_problems=1000"]) == 2
    assert "expected 1000 problems with trajectories" in capsys.readouterr().err
