"""The real graph and the real stages, with measuring alone replaced by records of known numbers.

Composing, dedup, rows, shards, card and run record are the real ones. `FakeBench` stands where the
device would be: it admits a problem by its declared ops and writes trajectories into the store.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import apache_beam as beam
import pyarrow.parquet as pq
import pytest
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from dedup.signature import ngrams_of
from operator_templates.compose import ComposeError
from pipelines import ops6k, output, stages, summary
from pipelines.options import RunConfig
from runtime.sandbox import ParentGone
from runtime.store import Store
from schemas.codec import content_key, to_json
from schemas.records import (
    Admission,
    AdmitReason,
    Problem,
    Rejection,
    StopReason,
    Target,
    TrajectoryKind,
)
from tests import factories

N = 24


class FakeBench:
    """Screening and rollouts by rule: index 4 crashes when screened, 5 raises in its rollouts, and
    every third problem is beyond the policy when optimized."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.screened: list[int] = []

    def screen(self, problem: Problem, *_: Any) -> Admission:
        self.screened.append(problem.index)
        if problem.index == 4:
            return factories.refused(problem.problem_id, AdmitReason.CRASH)
        names = [op.lower() for op in problem.ops]
        return factories.admission(
            problem.problem_id,
            operators=tuple(names),
            ngrams=ngrams_of(names),
            ngrams_attributes=ngrams_of([f"{name}(fp32)" for name in names]),
        )

    def rollout(self, problem: Problem, admission: Admission, *_: Any) -> dict[TrajectoryKind, str]:
        if problem.index == 5:
            raise OSError("no space left on device")
        kept = replace(factories.kept(), problem=problem, admission=admission)
        keys = {}
        for kind in TrajectoryKind:
            unsupported = kind is TrajectoryKind.OPTIMIZED and problem.index % 3 == 0
            best = None if unsupported else factories.verdict(eager=2.0, compile=1.5)
            stop = StopReason.UNSUPPORTED if unsupported else StopReason.SUBMITTED
            trajectory = factories.trajectory(kept, best, kind=kind, stop_reason=stop)
            keys[kind] = content_key("trajectory", problem.problem_id, kind)
            self.store.put("trajectories", keys[kind], to_json(trajectory))
        return keys


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> tuple[int, FakeBench]:
    """The graph in this process; exit code and what was measured."""
    config = replace(RunConfig(output=str(folder), target="cpu", num_problems=N), **changes)
    bench = FakeBench(Store(config.store_root))
    monkeypatch.setattr(stages, "screen", bench.screen)
    monkeypatch.setattr(stages, "agent_rollout", bench.rollout)
    monkeypatch.setattr(stages, "machine", lambda _: None)
    monkeypatch.setattr(stages, "TOOLS", json.loads(factories.TOOLS))
    output.claim(config, Target.CPU)
    pipeline = beam.Pipeline(runner=FnApiRunner())
    ops6k.build(pipeline, config)
    pipeline.run().wait_until_finish()
    return summary.conclude(config), bench


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    folder = tmp_path_factory.mktemp("run") / "out"
    with pytest.MonkeyPatch.context() as monkeypatch:
        code, _ = run(folder, monkeypatch)
        yield folder, code


def table(folder: Path, config: str) -> list[dict[str, Any]]:
    return [
        row
        for file in sorted((folder / "data" / config).glob("*.parquet"))
        for row in pq.read_table(file).to_pylist()
    ]


def parquet(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*.parquet")}


def test_every_candidate_is_somewhere_and_rows_join(dataset: tuple[Path, int]) -> None:
    folder, _ = dataset
    kept = {row["index"]: row["problem_id"] for row in table(folder, "problems")}
    rejected = [row for row in table(folder, "rejected") if row["stage"] != "export"]
    lost = {row["index"] for row in rejected if row["kind"] is None}
    assert set(kept) | lost == set(range(N))
    assert not set(kept) & lost
    assert 4 in lost
    for config in ("trajectories", "sft", "critic", "ppo_warmup", "rl"):
        assert {row["problem_id"] for row in table(folder, config)} <= set(kept.values())


def test_a_failed_rollout_costs_two_trajectories_and_not_the_problem(
    dataset: tuple[Path, int],
) -> None:
    folder, code = dataset
    assert code == 1
    assert 5 in {row["index"] for row in table(folder, "problems")}
    bugs = [row for row in table(folder, "rejected") if row["reason"] == "internal_error"]
    assert [(row["index"], row["stage"]) for row in bugs] == [(5, "rollout")] * 2
    assert {row["kind"] for row in bugs} == {"reference", "optimized"}
    assert all(row["detail"].startswith("OSError: no space left") for row in bugs)


def test_run_json_holds_the_sums_the_times_and_the_results(dataset: tuple[Path, int]) -> None:
    folder, _ = dataset
    record = json.loads((folder / "run.json").read_text())
    problems, trajectories = table(folder, "problems"), table(folder, "trajectories")
    assert record["kept"] == len(problems)
    assert record["trajectories"] == len(trajectories)
    assert record["device"]["device"] == "test device"
    assert set(record["seconds"]) >= {"compose", "admit", "dedup", "rollout", "export", "total"}
    reference = record["results"]["reference"]
    assert reference["correct"] == reference["faster_than_compile"] == len(problems) - 1
    assert reference["geomean_speedup_eager"] == pytest.approx(2.0)
    assert reference["geomean_speedup_compile"] == pytest.approx(1.5)
    optimized = record["results"]["optimized"]
    assert optimized["correct"] == len(trajectories) - reference["correct"]


def test_the_same_run_again_measures_and_changes_nothing(
    dataset: tuple[Path, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another folder, the same store: what was measured is replayed into the same bytes."""
    folder, _ = dataset
    run(tmp_path / "out", monkeypatch, store=f"{folder}/.store")
    assert parquet(tmp_path / "out") == parquet(folder)


def test_more_problems_continue_a_finished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    run(folder, monkeypatch, num_problems=4)
    monkeypatch.setattr("pipelines.transforms.PROBLEMS_PER_SHARD", 5)
    run(folder, monkeypatch, num_problems=10)
    files = sorted(file.name for file in (folder / "data/problems").glob("train-*"))
    assert files == ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]
    record = json.loads((folder / "run.json").read_text())
    assert (record["candidates"], record["settings"]["attempts"]) == (10, 2)
    assert len(table(folder, "problems")) == record["kept"]


def test_a_problem_that_cannot_be_composed_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Problem:
        raise ComposeError("5 ops in fp32: too large (400 of 400 draws)")

    monkeypatch.setattr(stages.composer, "compose", refuse)
    (row,) = stages.compose(RunConfig(output=str(tmp_path), target="cpu"), 3)
    assert isinstance(row, Rejection)
    assert (row.stage, row.reason, row.index) == ("compose", "no_composition", 3)
    assert row.detail == "5 ops in fp32: too large (400 of 400 draws)"


def test_candidates_depend_on_seed_and_index_alone(tmp_path: Path) -> None:
    def ids(folder: str, seed: int, order: range) -> dict[int, str]:
        config = RunConfig(output=str(tmp_path / folder), target="cpu", seed=seed)
        items = [item for index in order for item in stages.compose(config, index)]
        return {item["index"]: item["problem_id"] for item in items if isinstance(item, dict)}

    forwards = ids("a", 1, range(8))
    assert ids("b", 1, range(7, -1, -1)) == forwards
    assert ids("c", 2, range(8)) != forwards


def test_equal_texts_keep_the_first_index_whatever_the_order(tmp_path: Path) -> None:
    config = RunConfig(output=str(tmp_path), target="cpu")
    names = ["sin", "cumsum", "erf", "flip"]  # far from the benchmark
    admission = factories.admission(
        "p" * 16,
        operators=tuple(names),
        ngrams=ngrams_of(names),
        ngrams_attributes=ngrams_of(names),
    )
    items = [
        {"index": index, "problem_id": "p" * 16, "candidate": str(index)} for index in (9, 2, 5)
    ]
    Store(config.store_root).put("admitted", "a" * 16, to_json(admission))
    results = list(stages.deduplicate(config, [item | {"admission": "a" * 16} for item in items]))
    (kept,) = (item for item in results if isinstance(item, dict))
    assert (kept["index"], kept["candidate"]) == (2, "2")
    lost = {row.index: row.reason for row in results if isinstance(row, Rejection)}
    assert lost == {9: "exact_copy", 5: "exact_copy"}


@pytest.mark.parametrize("stage", ["screen", "rollout"])
def test_a_killed_parent_costs_the_problem_that_kills_it(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Number 2 kills it each time it is measured, and number 6 is under way beside it once."""
    killed: list[int] = []
    measure = getattr(FakeBench, stage)

    def beside(self: FakeBench, problem: Problem, *rest: Any) -> Any:
        if problem.index == 2 or (problem.index == 6 and 6 not in killed):
            killed.append(problem.index)
            raise ParentGone("the warm parent is gone")
        return measure(self, problem, *rest)

    monkeypatch.setattr(FakeBench, stage, beside)
    code, _ = run(tmp_path / "out", monkeypatch)
    assert code == 1
    assert sorted(killed) == [2, 2, 6]
    table = pq.read_table(tmp_path / "out" / "data" / "rejected").to_pylist()
    lost = {row["index"] for row in table if "ParentGone" in row["detail"]}
    assert lost == {2}


def test_what_travels_is_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records stay in the store: a shuffle has ids and keys, whatever a problem is like."""
    config = RunConfig(output=str(tmp_path), target="cpu", num_problems=N)
    bench = FakeBench(Store(config.store_root))
    monkeypatch.setattr(stages, "screen", bench.screen)
    monkeypatch.setattr(stages, "machine", lambda config: None)
    composed = [item for index in range(8) for item in stages.compose(config, index)]
    items = [item for item in composed if isinstance(item, dict)]
    admitted = [item for one in items for item in stages.admit(config, one)]
    kept = [item for item in admitted if isinstance(item, dict)]
    unique = [item for item in stages.deduplicate(config, kept) if isinstance(item, dict)]
    assert unique
    assert all(len(json.dumps(item)) < 1000 for item in (*items, *kept, *unique))


def test_a_bug_in_building_rows_is_refused_by_the_configs_it_hits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise TypeError("not a row")

    monkeypatch.setattr(stages.export_rows, "rows_of_trajectory", fail)
    code, _ = run(tmp_path / "out", monkeypatch, num_problems=3)
    assert code == 1
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["configs"]["problems"]["refused"] == {}
    assert record["kept"] > 0
    for config in ("trajectories", "sft", "critic"):
        refused = record["configs"][config]["refused"]
        assert refused == {"internal_error": record["trajectories"]}


def test_a_run_that_keeps_nothing_ends_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeBench, "screen", lambda self, p, *_: factories.refused(p.problem_id))
    monkeypatch.setattr(
        "pipelines.finish.machine", lambda _: SimpleNamespace(environment=factories.environment())
    )
    code, _ = run(tmp_path / "out", monkeypatch, num_problems=2)
    assert code == 0
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (record["candidates"], record["kept"]) == (2, 0)
    assert record["stages"][1]["rejected"] == {"constant_output": 2}
