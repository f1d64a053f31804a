"""Parquet shards, the same bytes on every run, and the order in which an export shows.

    DIR/data/CONFIG/SPLIT-00000-of-000NN.parquet
    DIR/run.json, DIR/report.html
    DIR/README.md      written last: without it the folder is no dataset

`begin` takes README.md away, `write_shard` writes one file, `sweep` deletes what is not part of
this export; `finish.finish` sweeps and writes the documents. A run that dies in between leaves a
folder that does not load, never one that loads half. Paths are local or any URL fsspec reaches.

A split without rows is a file with the schema and no row group. `datasets` cannot load an empty
split, so the card does not list it; pyarrow and pandas read it.
"""

from __future__ import annotations

import hashlib
import inspect
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import IO, Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from schemas.arrow import SCHEMAS, splits_of
from training_export.columns import Row
from training_export.rows import Placed
from training_export.validate import validate

ROWS_PER_GROUP = 1000
"""The Hub's viewer scans whole row groups; trajectories are long."""

_ID = {
    "trajectories": "trajectory_id",
    "sft": "trajectory_id",
    "critic": "trajectory_id",
}

# Since pyarrow 21: pages end where the content says, so that on the Hub a changed row does not
# move every later page.
_CONTENT_DEFINED_CHUNKING = "use_content_defined_chunking" in str(
    inspect.getdoc(pq.write_table)
) + str(inspect.getdoc(pq.ParquetWriter))


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A written file; `file` is relative to the dataset folder."""

    file: str
    config: str
    split: str
    rows: int
    size_bytes: int


def row_id(config: str, row: Row) -> str:
    """What a row is called: decides its shard and its place in it."""
    if config == "rejected":
        return "/".join(str(row[k]) for k in ("stage", "problem_id", "index", "kind", "reason"))
    return str(row[_ID.get(config, "problem_id")])


def digest(key: str) -> int:
    """64 bits of a hash of a row id, which order and place rows without picking any."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")


def shard_of(key: str, num_shards: int) -> int:
    """Which of `num_shards` shards a row id belongs to: the same on every machine."""
    return digest(key) % num_shards


def shard_file(config: str, split: str, index: int, num_shards: int) -> str:
    """Path of a shard below the dataset folder."""
    return f"data/{config}/{split}-{index:05d}-of-{num_shards:05d}.parquet"


def all_shards(num_shards: Mapping[str, int]) -> list[tuple[str, str, int]]:
    """Every (config, split, index) of an export; configs not named get one shard a split."""
    return [
        (config, split, index)
        for config in SCHEMAS
        for split in splits_of(config)
        for index in range(num_shards.get(config, 1))
    ]


def write_shard(path: str, config: str, rows: Sequence[Row]) -> tuple[int, int]:
    """Write one shard, sorted by row id, whole or not at all; returns its rows and bytes.

    Raises ValueError naming the field when a row does not fit the schema, or naming the row when
    an id is there twice.
    """
    ordered = sorted(rows, key=lambda row: (row_id(config, row), str(row.get("detail"))))
    _refuse_repeats(config, ordered)
    schema = SCHEMAS[config]
    options: dict[str, Any] = {"compression": "zstd", "write_page_index": True}
    if _CONTENT_DEFINED_CHUNKING:
        options["use_content_defined_chunking"] = True
    with (
        atomic_file(path) as file,
        pq.ParquetWriter(file, schema, **options) as writer,
    ):
        for start in range(0, len(ordered), ROWS_PER_GROUP):
            group = [validate(config, row) for row in ordered[start : start + ROWS_PER_GROUP]]
            writer.write_table(pa.Table.from_pylist(group, schema=schema), ROWS_PER_GROUP)
    fs, plain = fsspec.core.url_to_fs(path)
    fs.invalidate_cache()
    return len(ordered), int(fs.size(plain))


def _refuse_repeats(config: str, ordered: Sequence[Row]) -> None:
    if config == "rejected":  # a row may be lost twice for one reason, at two retries
        return
    keys = [row_id(config, row) for row in ordered]
    repeats = sorted({a for a, b in pairwise(keys) if a == b})
    if repeats:
        raise ValueError(f"{config}: ids {repeats[:3]} are there twice; deduplicate before export")


def write_rows(root: str, placed: Iterable[Placed], num_shards: Mapping[str, int]) -> list[Shard]:
    """Write every shard of an export from rows in memory: what the pipeline does, without Beam."""
    groups: dict[tuple[str, str, int], list[Row]] = {key: [] for key in all_shards(num_shards)}
    for config, split, row in placed:
        index = shard_of(row_id(config, row), num_shards.get(config, 1))
        groups[config, split, index].append(row)
    written = []
    for (config, split, index), rows in groups.items():
        file = shard_file(config, split, index, num_shards.get(config, 1))
        count, size = write_shard(f"{root}/{file}", config, rows)
        written.append(Shard(file=file, config=config, split=split, rows=count, size_bytes=size))
    return written


def rows_written(written: Iterable[Shard]) -> dict[str, dict[str, int]]:
    """{config: {split: rows}} of an export: what the run record wants."""
    rows = {config: dict.fromkeys(splits_of(config), 0) for config in SCHEMAS}
    for shard in written:
        rows[shard.config][shard.split] += shard.rows
    return rows


def begin(root: str) -> None:
    """Take the card away, so that the folder is no dataset until `finish`.

    Raises FileExistsError when the folder has a README.md that no export wrote.
    """
    fs, path = fsspec.core.url_to_fs(root)
    fs.invalidate_cache()
    if not fs.exists(f"{path}/README.md"):
        return
    if not fs.exists(f"{path}/run.json"):
        raise FileExistsError(f"{root} has a README.md and no run.json: export elsewhere")
    fs.rm_file(f"{path}/README.md")


def sweep(root: str, files: Iterable[str]) -> None:
    """Delete every shard below `root` that is not in `files`, paths relative to `root`.

    Raises FileNotFoundError when one of `files` is missing; then nothing is deleted.
    """
    fs, path = fsspec.core.url_to_fs(root)
    fs.invalidate_cache()
    expected = {f"{path}/{file}" for file in files}
    found = {f for f in fs.find(f"{path}/data") if f.endswith((".parquet", ".tmp"))}
    if missing := sorted(expected - found):
        raise FileNotFoundError(f"{len(missing)} shards were not written, such as {missing[:3]}")
    for stale in sorted(found - expected):
        fs.rm_file(stale)


@contextmanager
def atomic_file(path: str) -> Iterator[IO[bytes]]:
    """A file to write that gets its name when the block ends, and never when it raises."""
    fs, plain = fsspec.core.url_to_fs(path)
    folder, _, name = plain.rpartition("/")
    temporary = f"{folder}/.{name}.{uuid.uuid4().hex}.tmp"
    fs.makedirs(folder, exist_ok=True)
    try:
        with fs.open(temporary, "wb") as file:
            yield file
        fs.mv(temporary, plain)
    except BaseException:
        if fs.exists(temporary):
            fs.rm_file(temporary)
        raise
