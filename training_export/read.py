"""An export read back: what the card and the report are made from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from schemas.arrow import SCHEMAS, splits_of


def files(root: str, config: str, split: str) -> list[str]:
    """Shards of a split, sorted, as paths of the filesystem of `root`."""
    fs, path = fsspec.core.url_to_fs(root)
    fs.invalidate_cache()
    return sorted(fs.glob(f"{path}/data/{config}/{split}-*-of-*.parquet"))


def table(root: str, config: str, columns: Sequence[str]) -> pa.Table:
    """These columns of every row of a config, both splits, in the order of the files.

    Raises ValueError when a file was written with another schema than `schemas.arrow` has now.
    """
    return pa.concat_tables(
        split_table(root, config, split, columns) for split in splits_of(config)
    )


def split_table(root: str, config: str, split: str, columns: Sequence[str]) -> pa.Table:
    """The same for one split."""
    fs, _ = fsspec.core.url_to_fs(root)
    schema = pa.schema([SCHEMAS[config].field(name) for name in columns])
    parts = [schema.empty_table()]
    for path in files(root, config, split):
        with fs.open(path, "rb") as file:
            found = pq.ParquetFile(file)
            if not found.schema_arrow.equals(SCHEMAS[config]):
                raise ValueError(f"{path} has another schema than this version: export again")
            parts.append(found.read(columns=list(columns)).select(list(columns)))
    return pa.concat_tables(parts)


def rows(root: str, config: str, columns: Sequence[str]) -> list[dict[str, Any]]:
    """The same as dicts."""
    return list(table(root, config, columns).to_pylist())


def split_rows(root: str, config: str, split: str, columns: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of one split."""
    return list(split_table(root, config, split, columns).to_pylist())


def sizes(root: str) -> dict[str, dict[str, dict[str, int]]]:
    """{config: {split: {files, rows, bytes, memory_bytes}}} from the footers of the shards."""
    fs, _ = fsspec.core.url_to_fs(root)
    found: dict[str, dict[str, dict[str, int]]] = {}
    for config in SCHEMAS:
        found[config] = {}
        for split in splits_of(config):
            total = {"files": 0, "rows": 0, "bytes": 0, "memory_bytes": 0}
            for path in files(root, config, split):
                with fs.open(path, "rb") as file:
                    footer = pq.read_metadata(file)
                total["files"] += 1
                total["rows"] += footer.num_rows
                total["bytes"] += int(fs.size(path))
                groups = (footer.row_group(i) for i in range(footer.num_row_groups))
                total["memory_bytes"] += sum(group.total_byte_size for group in groups)
            found[config][split] = total
    return found


def check_rows(found: dict[str, dict[str, dict[str, int]]], run: dict[str, Any]) -> None:
    """Raise ValueError unless the shards hold as many rows as the run record says they do."""
    for config, splits in found.items():
        have = {split: total["rows"] for split, total in splits.items()}
        said = run["configs"][config]["rows"]
        if any(have[split] != said.get(split, 0) for split in have):
            raise ValueError(f"{config}: run.json says {said}, the shards hold {have} rows")


def geomean(values: Iterable[float]) -> float | None:
    """Geometric mean; None of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None
