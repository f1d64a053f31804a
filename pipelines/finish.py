"""The end of a run: every count checked, then report, `run.json` and, last of all, the card.

A folder without a card is not a dataset, so a run that was killed leaves nothing that loads by
half.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipelines import output
from pipelines.items import admission_of
from pipelines.options import RunConfig
from pipelines.spans import seconds_per_stage
from pipelines.workshop import local_path, machine
from runtime.lease import held_seconds
from schemas.codec import from_json
from schemas.records import Environment, Rejection, TrajectoryKind
from training_export import finish as export
from training_export import read, run_record, shards

ROOT = str(Path(__file__).resolve().parent.parent)


def finish(
    config: RunConfig,
    _: None,
    kept: Sequence[dict[str, Any]],
    rejected: Sequence[dict[str, Any]],
    files: Sequence[dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    """Write what describes the dataset. Raises ValueError when a sum does not add up."""
    names = [file["file"] for file in files]
    shards.sweep(
        config.output, names
    )  # files of an earlier, smaller run are not results of this one
    record = _record(config, kept, rejected, files)
    record["results"] = results(config.output, len(kept))
    export.finish(config.output, names, record)
    yield record


def _record(
    config: RunConfig,
    kept: Sequence[dict[str, Any]],
    rejected: Sequence[dict[str, Any]],
    files: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    marker = output.read(config)
    started = marker["attempts"][-1]["started"]
    wall_s = time.time() - started
    rows: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for file in files:
        rows[file["config"]][file["split"]] += file["rows"]
    lease_log = local_path(config, "lease.log")
    leased_s = held_seconds(lease_log, since=started) if lease_log else None
    stages_s = seconds_per_stage(local_path(config, "spans.log"), since=started)
    return run_record.build_run_record(
        command=marker["attempts"][-1]["command"],
        seed=config.seed,
        started=datetime.fromtimestamp(marker["attempts"][0]["started"], UTC).isoformat(),
        commit=run_record.git_commit(ROOT),
        device=_device(config, kept),
        settings={**marker["settings"], "attempts": len(marker["attempts"])},
        candidates=config.num_problems,
        kept=len(kept),
        rollouts=len(TrajectoryKind) * len(kept),
        trajectories=sum(len(item["trajectories"]) for item in kept),
        losses=run_record.count_losses(from_json(Rejection, row) for row in rejected),
        rows=rows,
        seconds={**stages_s, "total": round(wall_s, 3)},
        lease_share=None if leased_s is None else round(leased_s / wall_s, 4),
    )


def _device(config: RunConfig, kept: Sequence[dict[str, Any]]) -> Environment:
    """Where the run measured. This stage may run on another machine, so the records say it."""
    if kept:
        first = min(kept, key=lambda item: item["index"])
        return admission_of(config, first).environment
    return machine(config).environment


def results(root: str, kept: int) -> dict[str, dict[str, float | int | None]]:
    """Per kind of trajectory: how many problems have a correct one, one faster than eager, one
    faster than torch.compile (by the paper's reward: 1, 2, 3), and the geomean speedups of the
    correct ones.
    """
    columns = ("kind", "reward", "speedup_eager", "speedup_compile")
    found = read.rows(root, "trajectories", columns)
    return {
        str(kind): _results([r for r in found if r["kind"] == kind], kept)
        for kind in TrajectoryKind
    }


def _results(rows: Sequence[dict[str, Any]], kept: int) -> dict[str, float | int | None]:
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    return {
        "problems": kept,
        "correct": sum(reward >= 1 for reward in rewards),
        "faster_than_eager": sum(reward >= 2 for reward in rewards),
        "faster_than_compile": sum(reward >= 3 for reward in rewards),
        "geomean_speedup_eager": _geomean(rows, "speedup_eager"),
        "geomean_speedup_compile": _geomean(rows, "speedup_compile"),
    }


def _geomean(rows: Sequence[dict[str, Any]], column: str) -> float | None:
    return read.geomean(row[column] for row in rows if row[column] is not None)
