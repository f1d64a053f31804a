"""KernelBench's first leaderboard: `docs/assets/data.json`, up to five kernels for a problem.

What is there passed KernelBench's own check. Its problems lie beside it; they are of the first
version (v0), with inputs so small that many of them measure launches. What it claims is for those.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks.published.pairs import Pair, chosen
from benchmarks.published.records import Published, PublishedError, Suite, text_of
from schemas.records import Target

ASSETS = Path("docs/assets")
TITLE = re.compile(r"Level (\d+): ((\d+)_\w+)")


def read(root: Path, target: Target) -> Iterator[Published]:
    """Raises PublishedError."""
    return chosen(_pairs(root / ASSETS))


def _pairs(folder: Path) -> Iterator[Pair]:
    file = folder / "data.json"
    try:
        for title, entries in json.loads(text_of(file)).items():
            level, problem, number = TITLE.fullmatch(title).groups()  # type: ignore[union-attr]
            for entry in entries:
                speedup = entry["torch_speedup"]
                yield Pair(
                    name=f"{entry['display_name']}/{level}/{number}",
                    level=int(level),
                    problem=problem,
                    code=text_of(folder / "solutions" / f"{entry['file']}.py"),
                    problem_code=text_of(folder / "problems" / f"l{level}_p{number}.py"),
                    claimed=float(speedup) if isinstance(speedup, int | float) else None,
                )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PublishedError(
            f"{file}: expected {{'Level 1: 1_…': [{{display_name, torch_speedup, file}}]}}, "
            f"got {error!r}"
        ) from error


SUITE = Suite(
    url="github.com/anneouyang/KernelBenchLeaderboard", marker=str(ASSETS / "data.json"), read=read
)
