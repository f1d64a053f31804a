"""The benchmark's operator signatures: no text of it, only ids and operator names.

    python -m dedup.kernelbench build --source=DIR_OR_HUB_ID --output=FILE [--revision=COMMIT]

rebuilds the index. `--source` is a folder with level1, level2 and level3 of KernelBench files, or
whatever `datasets.load_dataset` takes (a Hub id such as ScalingIntelligence/KernelBench, or a
local dataset folder) with the columns code, level, name and problem_id. Building executes the
benchmark's files in this process, one by one: use a copy that you trust. Two problems of level 3
import einops. Level 4 (wrappers of whole transformers models) is left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from dedup.signature import ngrams_of

INDEX_SCHEMA_VERSION = 1
BUNDLED = "kernelbench_signatures.json"
LEVELS = (1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class BenchmarkProblem:
    """One benchmark problem, such as `level1/23`: its operators in order, and which are constant
    no-ops.
    """

    id: str
    sequence: tuple[str, ...]
    neutral: tuple[int, ...]
    ngrams: tuple[str, ...]
    ngrams_effective: tuple[str, ...]

    @staticmethod
    def of(id: str, sequence: Sequence[str], neutral: Sequence[int]) -> BenchmarkProblem:
        kept = [name for i, name in enumerate(sequence) if i not in set(neutral)]
        return BenchmarkProblem(
            id=id,
            sequence=tuple(sequence),
            neutral=tuple(neutral),
            ngrams=ngrams_of(sequence),
            ngrams_effective=ngrams_of(kept),
        )

    @property
    def operators(self) -> tuple[str, ...]:
        """The sequence without constant no-ops."""
        return tuple(name for i, name in enumerate(self.sequence) if i not in self.neutral)


def load_index(path: str | Path | None = None) -> list[BenchmarkProblem]:
    """The index in file order; the bundled one without a path.

    Raises:
        ValueError: the file has another schema version.
    """
    source = resources.files("dedup").joinpath(BUNDLED) if path is None else Path(path)
    content = json.loads(source.read_text())
    if content.get("schema_version") != INDEX_SCHEMA_VERSION:
        raise ValueError(
            f"{source}: expected index schema {INDEX_SCHEMA_VERSION}, got "
            f"{content.get('schema_version')}; rebuild it with python -m dedup.kernelbench build"
        )
    return [
        BenchmarkProblem.of(p["id"], p["operators"].split(), p["neutral"])
        for p in content["problems"]
    ]


def build_index(source: str, revision: str | None = None) -> dict[str, Any]:
    """Trace every problem of levels 1 to 3 of `source` into the content of an index file.

    Raises:
        RuntimeError: some problems could not be traced (all are named), or there are none.
    """
    from runtime.problem_code import load_module
    from runtime.trace import trace_operators

    problems, failures = [], []
    for id, code in sorted(_sources(source, revision), key=lambda item: _natural(item[0])):
        try:
            nodes = trace_operators(load_module(code, id.replace("/", "_")))
        except Exception as error:  # one bad file must not hide the others
            failures.append(f"{id}: {type(error).__name__}: {error}")
            continue
        neutral = [i for i, node in enumerate(nodes) if node.neutral]
        operators = " ".join(node.operator for node in nodes)
        problems.append({"id": id, "operators": operators, "neutral": neutral})
    if failures or not problems:
        raise RuntimeError(
            f"{len(failures)} problems of {source} could not be traced, {len(problems)} could; an "
            "index must hold all of them. Install what they import (level 3 needs einops) and "
            "build again.\n" + "\n".join(failures)
        )
    return {
        "schema_version": INDEX_SCHEMA_VERSION,
        "benchmark": "KernelBench",
        "revision": revision,
        "problems": problems,
    }


def write_index(content: dict[str, Any], path: str | Path) -> None:
    """Write an index file, one problem a line so that a change of the benchmark reads as a diff."""
    head = {key: value for key, value in content.items() if key != "problems"}
    lines = ",\n".join(json.dumps(problem) for problem in content["problems"])
    Path(path).write_text(json.dumps(head)[:-1] + ', "problems": [\n' + lines + "\n]}\n")


def _sources(source: str, revision: str | None) -> Iterator[tuple[str, str]]:
    """(id, code) of every problem of levels 1 to 3."""
    folders = [(level, Path(source) / f"level{level}") for level in LEVELS]
    if any(folder.is_dir() for _, folder in folders):
        for level, folder in folders:
            for path in folder.glob("[0-9]*_*.py"):
                yield f"level{level}/{path.name.split('_')[0]}", path.read_text()
        return
    import datasets

    for split in datasets.load_dataset(source, revision=revision).values():
        for row in split:
            if row["level"] in LEVELS:
                yield f"level{row['level']}/{row['problem_id']}", row["code"]


def _natural(id: str) -> tuple[int, int]:
    level, number = id.removeprefix("level").split("/")
    return int(level), int(number)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m dedup.kernelbench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="trace a copy of KernelBench into an index file")
    build.add_argument("--source", required=True, help="folder with level1/2/3, or a dataset id")
    build.add_argument("--output", required=True, help="index file to write")
    build.add_argument("--revision", help="commit of the source, recorded and asked for on the Hub")
    options = parser.parse_args(arguments)
    print(f"tracing {options.source}: this executes its files in this process", flush=True)
    content = build_index(options.source, options.revision)
    write_index(content, options.output)
    print(f"{len(content['problems'])} problems -> {options.output}")


if __name__ == "__main__":
    main()
