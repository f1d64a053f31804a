"""A whole export, written for real and loaded with datasets, pandas and pyarrow."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from schemas.arrow import SCHEMAS, splits_of
from tests.export_flow import Flow, contents, export, make_flow
from training_export import read, shards
from training_export.finish import finish
from training_export.run_record import count_losses


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
