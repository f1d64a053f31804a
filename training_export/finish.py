"""The last step of an export: after it the folder is a dataset."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from training_export import shards
from training_export.card import card
from training_export.report import report


def finish(root: str, files: Iterable[str], run: dict[str, Any], repo_id: str = ".") -> None:
    """Delete shards of earlier exports, then write run.json, report.html and, last, README.md.

    `files` are the shards of this export relative to `root`, `run` is `build_run_record`'s dict,
    `repo_id` is what the load snippets name. Raises FileNotFoundError when a shard is missing,
    ValueError when the shards do not hold the rows the run record says; then there is no card.
    """
    shards.sweep(root, files)
    documents = {
        "run.json": json.dumps(run, indent=2, allow_nan=False) + "\n",
        "report.html": report(root, run),
        "README.md": card(root, run, repo_id),
    }
    for name, text in documents.items():
        with shards.atomic_file(f"{root}/{name}") as file:
            file.write(text.encode())
