"""CUDA-L1's kernels for KernelBench: `optimized_cuda_code/*.json`, one JSON object a line.

Those with CUDA kernels of their own, each text once: all of the first GPU's file, and of the next
ones what differs. Levels take turns, so that a run that is cut short has seen all of them.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.published.records import (
    Published,
    PublishedError,
    Suite,
    needed_libraries,
    one_file,
    text_of,
)
from schemas.records import Target

FOLDER = "optimized_cuda_code"
GPUS = ("h100", "a100", "h20", "l40", "3090")
"""In the order in which they are taken."""
FIELDS = ("level_id", "task_id", "ref_code", "custom_code", "score_default")
BUILDS = re.compile(r"\bload_inline\b|\bcpp_extension\b")


def read(root: Path, target: Target) -> Iterator[Published]:
    """Raises PublishedError."""
    levels: dict[int, list[Published]] = defaultdict(list)
    seen: set[tuple[int, int, str]] = set()
    found = [gpu for gpu in GPUS if (root / FOLDER / f"{gpu}.json").is_file()]
    for gpu in found:
        for row in _rows(root / FOLDER / f"{gpu}.json"):
            level, task, code = row["level_id"], row["task_id"], row["custom_code"] or ""
            if "__global__" in code and (level, task, code) not in seen:
                seen.add((level, task, code))
                levels[level].append(_published(f"{gpu}/{level}/{task}", row, code))
    in_turns = itertools.zip_longest(*(levels[level] for level in sorted(levels)))
    yield from (made for turn in in_turns for made in turn if made is not None)


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(text_of(file).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            yield {name: row[name] for name in FIELDS}
        except (ValueError, KeyError, TypeError) as error:
            fields = ", ".join(FIELDS)
            raise PublishedError(
                f"{file}, line {number}: expected a JSON object with {fields}, got {error!r}"
            ) from error


def _published(name: str, row: dict[str, Any], code: str) -> Published:
    score = row["score_default"]
    return Published(
        name=name,
        problem_code=row["ref_code"],
        files=one_file(code),
        why_not=why_not(code),
        claimed=float(score) if isinstance(score, int | float) else None,
        libraries=needed_libraries(row["ref_code"]),
    )


def why_not(code: str) -> str:
    """Why a module with CUDA text is of none of our forms, or ""."""
    try:
        with warnings.catch_warnings():  # of its text's, such as invalid escape sequences
            warnings.simplefilter("ignore")
            ast.parse(code)
    except (SyntaxError, ValueError, RecursionError) as error:
        return f"not a Python module: {type(error).__name__}"
    if BUILDS.search(code):
        return ""
    if re.search(r"\bcupy\b|\bpycuda\b", code):
        return "compiles at run time with cupy or pycuda, for which there is no form"
    return "its CUDA text is never built: no call of load_inline or load"


SUITE = Suite(url="github.com/deepreinforce-ai/CUDA-L1", marker=f"{FOLDER}/h100.json", read=read)
