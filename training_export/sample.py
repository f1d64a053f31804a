"""A small part of a dataset, for a repository or a look: some problems with all their rows.

    python -m training_export.sample DIR OUT --num_problems=24

The problems are those whose ids have the smallest hashes, a tenth of them (at least one) from
validation where there is one, so that nobody has picked them. As many problems that the run lost
stand in `rejected`. The sample keeps the `run.json` of the whole run; its own counts are in its
README.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec

from schemas.arrow import SCHEMAS, splits_of
from training_export import read, shards
from training_export.card import header
from training_export.run_record import PROBLEM_STAGES

MAX_BYTES = 2_000_000


def sample(root: str, out: str, num_problems: int) -> int:
    """Write the sample of the dataset at `root` into the folder `out`; returns its Parquet bytes.

    Raises FileExistsError when `out` holds anything, ValueError when there are not that many
    problems with trajectories or the sample is larger than MAX_BYTES.
    """
    if Path(out).exists() and any(Path(out).iterdir()):
        raise FileExistsError(f"{out} is not empty: name a new folder")
    with fsspec.open(f"{root}/run.json", "r") as file:
        run = json.load(file)
    chosen = choose(root, num_problems)
    size = 0
    for config, schema in SCHEMAS.items():
        for split in splits_of(config):
            rows = read.split_rows(root, config, split, schema.names)
            kept = [row for row in rows if row["problem_id"] in chosen]
            if config == "rejected":
                kept += [row for row in rows if row["stage"] in PROBLEM_STAGES][:num_problems]
            path = f"{out}/{shards.shard_file(config, split, 0, 1)}"
            size += shards.write_shard(path, config, kept)[1]
    if size > MAX_BYTES:
        raise ValueError(
            f"{size} bytes of Parquet, expected at most {MAX_BYTES}: take fewer problems"
        )
    Path(out, "run.json").write_text(json.dumps(run, indent=2, allow_nan=False) + "\n")
    Path(out, "README.md").write_text(_readme(out, run, len(chosen)))
    return size


def choose(root: str, num_problems: int) -> set[str]:
    """Ids of problems that have trajectories. Raises ValueError when there are too few."""
    with_rows = {row["problem_id"] for row in read.rows(root, "trajectories", ["problem_id"])}
    found: dict[str, list[str]] = {}
    for split in splits_of("problems"):
        ids = {
            row["problem_id"] for row in read.split_rows(root, "problems", split, ["problem_id"])
        }
        found[split] = sorted(ids & with_rows, key=shards.digest)
    held_out = found["validation"][: max(1, num_problems // 10)]
    chosen = {*held_out, *found["train"][: num_problems - len(held_out)]}
    if len(chosen) < num_problems:
        raise ValueError(f"expected {num_problems} problems with trajectories, got {len(chosen)}")
    return chosen


def _readme(out: str, run: dict[str, Any], num_problems: int) -> str:
    sizes = read.sizes(out)
    counts = "\n".join(
        f"| `{config}` | {sum(total['rows'] for total in splits.values())} |"
        for config, splits in sizes.items()
    )
    return (
        f"---\n{header(sizes).to_yaml()}\n---\n\n"
        f"# A sample of an ops6k run\n\n"
        f"{num_problems} of {run['kept']} kept problems with all their rows, made on "
        f"{run['device']['device']} with torch {run['device']['torch']} "
        f"(`{' '.join(run['command'])}`; all of it in `run.json`).\n\n"
        f"| config | rows |\n|---|---|\n{counts}\n\n"
        f'```python\nimport datasets\n\ndatasets.load_dataset(".", "trajectories")\n```\n'
    )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="A small part of a dataset.")
    parser.add_argument("root", help="the dataset: a folder or a URL")
    parser.add_argument("out", help="a new or empty folder")
    parser.add_argument("--num_problems", type=int, default=24)
    arguments = parser.parse_args(argv)
    try:
        size = sample(arguments.root, arguments.out, arguments.num_problems)
    except (OSError, ValueError) as error:
        print(f"sample: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.num_problems} problems, {size} bytes of Parquet in {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
