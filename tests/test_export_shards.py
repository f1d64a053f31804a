"""A whole export, written for real and loaded with datasets, pandas and pyarrow."""

from __future__ import annotations

import copy
import json
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from schemas.arrow import SCHEMAS, splits_of
from schemas.records import RejectStage, TrajectoryKind
from tests import factories
from training_export import card, card_text, read, report, shards
from training_export.finish import finish
from training_export.rows import (
    AgentPrompt,
    Placed,
    rows_of_problem,
    rows_of_rejection,
    rows_of_trajectory,
)
from training_export.rules import ExportSettings
from training_export.run_record import build_run_record, count_losses, git_commit, versions

SETTINGS = ExportSettings(tools=factories.TOOLS)


@dataclass(frozen=True, kw_only=True)
class Flow:
    """Hand-sized records of a run and the rows they become."""

    placed: list[Placed]
    candidates: int
    kept: int
    rollouts: int
    trajectories: int
    losses: Counter[tuple[str, str, str | None]]


def make_flow(num_train: int = 3, num_validation: int = 1) -> Flow:
    """Kept problems, each with a slow reference and a fast optimized rollout.

    Two more problems and one rollout are lost.
    """
    placed: list[Placed] = []
    rejections = [
        factories.rejection(100),
        factories.rejection(101, stage=RejectStage.DEDUP, reason="duplicate"),
    ]
    trajectories = 0
    for i in range(num_train + num_validation):
        kept = factories.kept(i, split="train" if i < num_train else "validation")
        parts = (kept.problem, kept.admission, kept.neighbour)
        prompt = AgentPrompt(system="You are an agent.", user=kept.problem.code)
        placed += rows_of_problem(*parts, prompt, SETTINGS)
        for kind, speedup in ((TrajectoryKind.REFERENCE, 0.5), (TrajectoryKind.OPTIMIZED, 2.0)):
            if i == 0 and kind is TrajectoryKind.REFERENCE:
                lost = {"stage": RejectStage.ROLLOUT, "reason": "unsupported", "kind": kind}
                rejections.append(
                    factories.rejection(i, problem_id=kept.problem.problem_id, **lost)
                )
                continue
            best = factories.verdict(eager=2 * speedup, compile=speedup)
            rollout = factories.trajectory(kept, best, kind=kind)
            placed += rows_of_trajectory(*parts, rollout, SETTINGS)
            trajectories += 1
    for rejection in rejections:
        placed += rows_of_rejection(rejection)
    losses = Counter(
        (row["stage"], row["reason"], row["kind"])
        for config, _, row in placed
        if config == "rejected"
    )
    kept_count = num_train + num_validation
    return Flow(
        placed=placed,
        candidates=kept_count + 2,
        kept=kept_count,
        rollouts=2 * kept_count,
        trajectories=trajectories,
        losses=losses,
    )


def record(flow: Flow, written: list[shards.Shard], **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "command": ["python", "-m", "pipelines.ops6k", "--target=cpu"],
        "seed": 7,
        "started": "2026-11-30T12:00:00+00:00",
        "commit": "0123abc",
        "device": factories.environment(),
        "settings": {"sft_rule": SETTINGS.sft_rule},
        "candidates": flow.candidates,
        "kept": flow.kept,
        "rollouts": flow.rollouts,
        "trajectories": flow.trajectories,
        "losses": flow.losses,
        "rows": shards.rows_written(written),
        "seconds": {"compose": 1.0, "admit": 20.0},
        "lease_share": 0.4,
    }
    return build_run_record(**values | changes)


def export(root: Path, flow: Flow, num_shards: dict[str, int] | None = None) -> dict[str, Any]:
    folder = str(root)
    shards.begin(folder)
    written = shards.write_rows(folder, flow.placed, num_shards or {})
    run = record(flow, written)
    finish(folder, [shard.file for shard in written], run)
    return run


def contents(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Flow, dict[str, Any]]:
    root = tmp_path_factory.mktemp("export")
    flow = make_flow()
    return root, flow, export(root, flow, {"trajectories": 3, "problems": 2})


def load(root: Path, config: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`load_dataset` with no network and a cache of its own."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    return datasets.load_dataset(str(root), config, cache_dir=str(cache))


@pytest.mark.parametrize("config", SCHEMAS)
def test_datasets_loads_every_config(
    config: str,
    exported: tuple[Path, Flow, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root, flow, run = exported
    loaded = load(root, config, tmp_path, monkeypatch)
    assert set(loaded) == set(splits_of(config))
    for split in loaded:
        expected = [row for c, s, row in flow.placed if (c, s) == (config, split)]
        assert len(loaded[split]) == run["configs"][config]["rows"][split] == len(expected)
        key = lambda row: json.dumps(row, sort_keys=True)  # noqa: E731
        assert sorted(loaded[split], key=key) == sorted(expected, key=key)


def test_pandas_and_pyarrow_read_the_shards(
    exported: tuple[Path, Flow, dict[str, Any]],
) -> None:
    root, flow, _ = exported
    for path in root.glob("data/*/*.parquet"):
        config = path.parent.name
        file = pq.ParquetFile(path)
        assert file.schema_arrow.equals(SCHEMAS[config], check_metadata=False)
        assert file.schema_arrow.metadata[b"schema_version"] == b"1"
        assert list(pandas.read_parquet(path).columns) == SCHEMAS[config].names
        for i in range(file.metadata.num_row_groups):
            column = file.metadata.row_group(i).column(0)
            assert column.compression == "ZSTD"
            assert column.has_column_index
    ids = [row["problem_id"] for row in read.rows(str(root), "problems", ["problem_id"])]
    assert sorted(ids) == sorted(r["problem_id"] for c, _, r in flow.placed if c == "problems")


def test_no_problem_is_in_both_splits(exported: tuple[Path, Flow, dict[str, Any]]) -> None:
    where: dict[str, set[str]] = {}
    for config, split, row in exported[1].placed:
        if config != "rejected":
            where.setdefault(row["problem_id"], set()).add(split)
    assert {len(splits) for splits in where.values()} == {1}


def test_exports_are_byte_identical_whatever_the_order(tmp_path: Path) -> None:
    flow = make_flow()
    one, two = tmp_path / "one", tmp_path / "two"
    export(one, flow, {"problems": 2})
    shuffled = copy.copy(flow.placed)
    shuffled.reverse()
    export(two, Flow(**{**flow.__dict__, "placed": shuffled}), {"problems": 2})
    assert contents(one) == contents(two)
    export(one, flow, {"problems": 2})
    assert contents(one) == contents(two), "and again in place"


def test_an_earlier_export_vanishes(tmp_path: Path) -> None:
    flow = make_flow()
    export(tmp_path, flow, {"problems": 3, "sft": 2})
    assert len(list(tmp_path.glob("data/problems/train-*"))) == 3
    (tmp_path / "data/problems/.train-00000-of-00001.parquet.0.tmp").write_bytes(b"left by kill -9")
    export(tmp_path, flow)
    files = {f for f in contents(tmp_path) if f.startswith("data/")}
    assert files == {shards.shard_file(c, s, i, 1) for c, s, i in shards.all_shards({})}


def test_an_empty_split_is_a_file_and_is_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "export"
    flow = make_flow(num_train=1, num_validation=0)
    export(root, flow, {"problems": 3})  # one row in three shards: two of them are empty
    loaded = load(root, "sft", tmp_path / "cache", monkeypatch)
    assert {split: len(rows) for split, rows in loaded.items()} == {"train": 1}
    assert len(load(root, "problems", tmp_path / "cache", monkeypatch)["train"]) == 1
    empty = root / "data/sft/validation-00000-of-00001.parquet"
    assert pq.read_schema(empty).equals(SCHEMAS["sft"])
    assert len(pandas.read_parquet(empty)) == 0
    assert "`sft` validation" in (root / "README.md").read_text()


def test_an_export_without_anything_still_has_its_files(tmp_path: Path) -> None:
    nothing = Flow(
        placed=[], candidates=0, kept=0, rollouts=0, trajectories=0, losses=count_losses([])
    )
    export(tmp_path, nothing)
    for config in SCHEMAS:
        assert read.table(str(tmp_path), config, SCHEMAS[config].names).num_rows == 0
    assert "configs" not in yaml.safe_load((tmp_path / "README.md").read_text().split("---")[1])


class Killed(BaseException):
    """Like KeyboardInterrupt, not an Exception."""


def test_a_write_that_dies_leaves_nothing_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row for c, s, row in make_flow(4, 0).placed if c == "problems"]
    path = tmp_path / "data/problems/train-00000-of-00001.parquet"
    monkeypatch.setattr(shards, "ROWS_PER_GROUP", 1)
    done: list[int] = []

    def die_in_the_third_group(config: str, row: dict[str, Any]) -> dict[str, Any]:
        done.append(1)
        if len(done) == 3:
            raise Killed
        return row

    with monkeypatch.context() as patch:
        patch.setattr(shards, "validate", die_in_the_third_group)
        with pytest.raises(Killed):
            shards.write_shard(str(path), "problems", rows)
    assert list(tmp_path.rglob("*.parquet")) == []
    assert list(tmp_path.rglob("*.tmp")) == []

    before = shards.write_shard(str(path), "problems", rows), path.read_bytes()
    done.clear()
    with monkeypatch.context() as patch:
        patch.setattr(shards, "validate", die_in_the_third_group)
        with pytest.raises(Killed):
            shards.write_shard(str(path), "problems", rows)
    assert path.read_bytes() == before[1], "the old file is whole"
    assert pq.ParquetFile(path).num_row_groups == 4


def test_an_unfinished_export_is_no_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = make_flow()
    root = tmp_path / "export"
    run = export(root, flow)
    shards.begin(str(root))
    shards.write_rows(str(root), flow.placed, {"sft": 2})
    with pytest.raises(ValueError, match="sft"):
        load(root, "sft", tmp_path / "cache", monkeypatch)
    with pytest.raises(FileNotFoundError, match="were not written"):
        finish(str(root), ["data/sft/train-00009-of-00010.parquet"], run)
    assert not (root / "README.md").exists()
    assert len(list(root.glob("data/sft/train-*"))) == 3, "nothing was deleted"


def test_begin_does_not_take_a_stranger_s_readme(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("my project")
    with pytest.raises(FileExistsError, match="export elsewhere"):
        shards.begin(str(tmp_path))
    assert (tmp_path / "README.md").read_text() == "my project"


def test_bad_rows_and_repeated_ids_are_not_written(tmp_path: Path) -> None:
    rows = [row for c, s, row in make_flow().placed if c == "problems"]
    path = str(tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=r"unknown keys \['colour'\]"):
        shards.write_shard(path, "problems", [rows[0] | {"colour": "red"}])
    with pytest.raises(ValueError, match=r"problems\.ops: null"):
        shards.write_shard(path, "problems", [rows[0] | {"ops": None}])
    with pytest.raises(ValueError, match="there twice"):
        shards.write_shard(path, "problems", [rows[0], rows[1], rows[0]])
    assert list(tmp_path.iterdir()) == []


def test_arrow_alone_would_have_lost_data() -> None:
    """Why rows are validated by hand: if this fails, `validate` may have become superfluous."""
    schema = pa.schema([pa.field("a", pa.list_(pa.int64()), nullable=False)])
    loose = pa.Table.from_pylist([{"a": None, "b": 1}], schema=schema)
    loose.validate(full=True)
    assert loose.column_names == ["a"]


def test_shard_of_is_fixed_for_ever() -> None:
    assert [shards.shard_of(key, 7) for key in ("", "a", "b", "0123456789abcdef")] == [0, 2, 5, 4]


def test_memory_filesystem_works_like_a_folder() -> None:
    rows = [row for c, s, row in make_flow().placed if c == "problems" and s == "train"]
    path = "memory://bucket/data/problems/train-00000-of-00001.parquet"
    count, size = shards.write_shard(path, "problems", rows)
    assert (count, size > 1000) == (3, True)
    assert read.table("memory://bucket", "problems", ["problem_id"]).num_rows == 3
    shards.sweep("memory://bucket", [])
    assert read.files("memory://bucket", "problems", "train") == []


def test_card_numbers_are_those_of_the_data(
    exported: tuple[Path, Flow, dict[str, Any]],
) -> None:
    root, _, _ = exported
    text = (root / "README.md").read_text()
    header = yaml.safe_load(text.split("---")[1])
    infos = {info["config_name"]: info for info in header["dataset_info"]}
    assert [c["config_name"] for c in header["configs"] if c.get("default")] == ["problems"]
    assert header["license"] == "cc-by-4.0"
    for config in SCHEMAS:
        frames = {
            split: [pandas.read_parquet(p) for p in sorted(root.glob(f"data/{config}/{split}-*"))]
            for split in splits_of(config)
        }
        counts = {split: sum(map(len, parts)) for split, parts in frames.items()}
        listed = {s["name"]: s["num_examples"] for s in infos[config]["splits"]}
        assert listed == counts
        on_disk = sum(p.stat().st_size for p in root.glob(f"data/{config}/*"))
        assert infos[config]["download_size"] == on_disk
        assert f"| `{config}` | {counts['train']} |" in text
        assert f"{on_disk:,} |" in text
        assert [f["name"] for f in infos[config]["features"]] == SCHEMAS[config].names
    assert "6 candidates = 4 kept + 2 rejected" in text
    assert "| optimized | 4 | 4 | 0 | 0 | 0 | 4 | 4.00 | 2.00 |" in text
    assert "| reference | 3 | 3 | 0 | 3 | 0 | 0 | 1.00 | 0.50 |" in text
    assert "| `sft` | 4 | not_faster_than_eager 3 |" in text
    assert str(root) not in text, "no path of the machine that made it"


def test_card_refuses_a_run_record_of_other_data(
    exported: tuple[Path, Flow, dict[str, Any]],
) -> None:
    root, _, run = exported
    wrong = copy.deepcopy(run)
    wrong["configs"]["sft"]["rows"]["train"] += 1
    for make in (card.card, report.report):
        with pytest.raises(ValueError, match=r"sft: run\.json says"):
            make(str(root), wrong)


def test_report_is_one_file_that_shows_the_kernels(
    exported: tuple[Path, Flow, dict[str, Any]],
) -> None:
    root, _, run = exported
    page = (root / "report.html").read_text()
    assert page.count("<details>") == 4
    assert "extern &quot;C&quot; void relu_0" in page
    assert "prefers-color-scheme: dark" in page
    assert "http://" not in page and "https://" not in page and "<script" not in page
    assert "constant_output 1" in page and "not_faster_than_eager 3" in page
    short = report.report(str(root), run, max_problems=2)
    assert short.count("<details>") == 2
    assert "Shown are 2 of 4" in short


def test_markdown_cells_cannot_break_the_table() -> None:
    text = card_text.table(["a", "b"], [["x|y\nz", 1234], ["", 5]])
    assert text.splitlines()[1:] == ["| --- | ---: |", "| x\\|y z | 1,234 |", "|  | 5 |"]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"candidates": 7}, r"7 candidates, 4 kept, 2 rejected; \+1 problems"),
        ({"kept": 3}, "problems: 4 rows"),
        ({"rollouts": 9}, "9 rollouts, 7 trajectories, 1 lost"),
        ({"trajectories": 8}, "trajectories: 7 rows"),
    ],
)
def test_runs_that_do_not_add_up_are_refused(
    change: dict[str, Any], match: str, tmp_path: Path
) -> None:
    flow = make_flow()
    written = shards.write_rows(str(tmp_path), flow.placed, {})
    with pytest.raises(ValueError, match=match):
        record(flow, written, **change)


def test_a_rollout_never_loses_the_problem(tmp_path: Path) -> None:
    flow = make_flow()
    written = shards.write_rows(str(tmp_path), flow.placed, {})
    losses = Counter(flow.losses)
    losses["rollout", "unsupported", None] = losses.pop(("rollout", "unsupported", "reference"))
    with pytest.raises(ValueError, match="needs a kind"):
        record(flow, written, losses=losses)


def test_stages_count_down_from_candidates_to_kept(
    exported: tuple[Path, Flow, dict[str, Any]],
) -> None:
    stages = {stage["stage"]: stage for stage in exported[2]["stages"]}
    assert [(s["entered"], s["kept"]) for s in stages.values()] == [
        (6, 6), (6, 5), (5, 5), (5, 4), (8, 7),
    ]  # fmt: skip
    assert stages["admit"]["rejected"] == {"constant_output": 1}
    assert json.loads((exported[0] / "run.json").read_text()) == exported[2]


def test_commit_and_versions(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert git_commit(str(tmp_path)) is None
    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "first")
    head = git("rev-parse", "HEAD")
    assert git_commit(str(tmp_path)) == head
    (tmp_path / "a").write_text("2")
    assert git_commit(str(tmp_path)) == f"{head}-dirty"
    assert {"python", "torch", "pyarrow"} <= versions().keys()
