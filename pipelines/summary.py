"""What a run prints at its end, all of it read from `run.json`, and its exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import fsspec

from pipelines.dead_letters import is_internal
from pipelines.options import RunConfig


def conclude(config: RunConfig) -> int:
    """Print the summary; 1 when a row was lost to a bug of ours, else 0."""
    with fsspec.open(f"{config.output}/run.json", "r") as file:
        record = json.load(file)
    print("\n".join(lines(record, config)), flush=True)
    bugs = internal_errors(record)
    if not bugs:
        return 0
    print(
        f"\nops6k: {sum(bugs.values())} rows were lost to errors of our own: "
        + ", ".join(f"{count} at {stage}" for stage, count in bugs.items())
        + f".\n  {config.output}/data/rejected has details; the same command tries them again.",
        file=sys.stderr,
    )
    return 1


def internal_errors(record: dict[str, Any]) -> dict[str, int]:
    """Rows lost to bugs of ours, by stage or config."""
    found = {stage["stage"]: stage["rejected"] for stage in record["stages"]}
    found |= {f"export of {name}": c["refused"] for name, c in record["configs"].items()}
    counts = {
        where: sum(count for reason, count in reasons.items() if is_internal(reason))
        for where, reasons in found.items()
    }
    return {where: count for where, count in counts.items() if count}


def lines(record: dict[str, Any], config: RunConfig) -> Iterator[str]:
    """The summary: funnel, results, seconds, where things are."""
    yield f"\n{'stage':<14}{'in':>6}{'kept':>6}  rejected"
    for stage in record["stages"]:
        reasons = ", ".join(f"{count} {reason}" for reason, count in stage["rejected"].items())
        yield f"{stage['stage']:<14}{stage['entered']:>6}{stage['kept']:>6}  {reasons or '-'}"
    lost = record["candidates"] - record["kept"]
    yield f"{record['candidates']} candidates = {record['kept']} kept + {lost} rejected"
    yield ""
    for kind, result in record["results"].items():
        yield f"{kind:<10} {_result(result)}"
    yield ""
    seconds = dict(record["seconds"])
    total = seconds.pop("total")
    parts = ", ".join(f"{stage} {value:.0f} s" for stage, value in seconds.items())
    yield f"{total:.0f} s in all: {parts or 'everything was finished before'}"
    if record["lease_share"] is not None:
        yield f"the device was measuring for {record['lease_share']:.0%} of that time"
    yield ""
    rows = {name: sum(c["rows"].values()) for name, c in record["configs"].items()}
    yield "rows: " + ", ".join(f"{count} {name}" for name, count in rows.items())
    yield f"read {config.output}/README.md, look at {config.output}/report.html"


def _result(result: dict[str, Any]) -> str:
    kept = result["problems"]

    def share(name: str) -> str:
        return f"{result[name]} of {kept} ({result[name] / kept:.0%})" if kept else "0 of 0"

    def speedup(name: str) -> str:
        value = result[f"geomean_speedup_{name}"]
        return "-" if value is None else f"{value:.2f}x"

    return (
        f"correct {share('correct')}, faster than eager {share('faster_than_eager')}, "
        f"faster than torch.compile {share('faster_than_compile')}; geomean speedup "
        f"{speedup('eager')} over eager, {speedup('compile')} over torch.compile"
    )
