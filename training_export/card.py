"""The dataset card: README.md from the shards and the run record, by one function."""

from __future__ import annotations

from typing import Any

from datasets import DatasetInfo, Features, SplitDict, SplitInfo
from datasets.info import DatasetInfosDict
from huggingface_hub import DatasetCardData

from schemas.arrow import SCHEMAS
from training_export import card_text, read

_SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"))


def card(root: str, run: dict[str, Any], repo_id: str = ".") -> str:
    """README.md of the export at `root`; `repo_id` is what the load snippets name: a Hub
    repository, or by default the folder the reader stands in.

    Numbers come from the shards; the flow before them comes from `run`. Raises ValueError when the
    two disagree.
    """
    sizes = read.sizes(root)
    read.check_rows(sizes, run)
    return f"---\n{header(sizes).to_yaml()}\n---\n\n{card_text.body(root, run, sizes, repo_id)}"


def header(sizes: dict[str, dict[str, dict[str, int]]]) -> DatasetCardData:
    """The YAML header, without splits that have no rows: `datasets` refuses to load those."""
    listed = {
        config: {split: total for split, total in splits.items() if total["rows"]}
        for config, splits in sizes.items()
    }
    listed = {config: splits for config, splits in listed.items() if splits}
    data = DatasetCardData(
        pretty_name="ops6k",
        license="cc-by-4.0",
        language=["en", "code"],
        task_categories=["text-generation", "reinforcement-learning"],
        tags=["cuda", "gpu-kernels", "kernelbench", "pytorch", "synthetic", "agent", "rl"],
        size_categories=[_size_category(sum(s["rows"] for s in sizes["problems"].values()))],
        configs=[_config(config, list(splits)) for config, splits in listed.items()] or None,
    )
    infos = {config: _info(config, splits) for config, splits in listed.items()}
    DatasetInfosDict(infos).to_dataset_card_data(data)
    return data


def _config(config: str, splits: list[str]) -> dict[str, Any]:
    files = [{"split": split, "path": f"data/{config}/{split}-*.parquet"} for split in splits]
    first = {"default": True} if config == "problems" else {}
    return {"config_name": config, **first, "data_files": files}


def _info(config: str, splits: dict[str, dict[str, int]]) -> DatasetInfo:
    infos = SplitDict()
    for split, total in splits.items():
        infos.add(SplitInfo(split, num_bytes=total["memory_bytes"], num_examples=total["rows"]))
    return DatasetInfo(
        config_name=config,
        features=Features.from_arrow_schema(SCHEMAS[config]),
        splits=infos,
        download_size=sum(total["bytes"] for total in splits.values()),
        dataset_size=sum(total["memory_bytes"] for total in splits.values()),
    )


def _size_category(rows: int) -> str:
    return next((name for limit, name in _SIZES if rows < limit), "n>1M")
