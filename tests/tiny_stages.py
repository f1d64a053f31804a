"""Stage functions of a few lines, so that the graph and its runners are tested without the rooms.

Candidate 3 cannot be composed, 5 raises where a bug would, 7 is a copy of 6, odd ones lose their
optimized trajectory.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import Any

from pipelines.options import RunConfig
from runtime.store import Store
from schemas.codec import content_id, content_key
from schemas.records import Rejection, RejectStage, TrajectoryKind


def _lost(index: int, stage: RejectStage, reason: str, kind: Any = None) -> Rejection:
    return Rejection(
        problem_id=content_id(str(index)),
        stage=stage,
        reason=reason,
        detail="",
        kind=kind,
        index=index,
    )


def _work(config: RunConfig, kind: str, index: int, seconds: float = 0.0) -> str:
    """Finished work that leaves a line in a log whenever it is really done."""
    store, key = Store(config.store_root), content_key(kind, config.seed, index)
    if store.get(kind, key) is None:
        time.sleep(seconds)
        store.put(kind, key, index)
        if not store.root.startswith("memory"):
            with open(f"{config.output}/done.log", "a") as log:
                log.write(f"{kind} {index} {os.getpid()}\n")
    return key


def compose(config: RunConfig, index: int) -> Iterator[Any]:
    if index == 3:
        yield _lost(index, RejectStage.COMPOSE, "too_large")
        return
    key = _work(config, "candidates", index)
    yield {"index": index, "problem_id": content_id(str(index)), "candidate": key}


def admit(config: RunConfig, item: Any) -> Iterator[Any]:
    if item["index"] == 5:
        raise RuntimeError("first line\nthe last line")
    delay = float(os.environ.get("TINY_DELAY_S", "0"))
    yield item | {"admission": _work(config, "admissions", item["index"], delay)}


def deduplicate(config: RunConfig, items: Any) -> Iterator[Any]:
    for item in sorted(items, key=lambda item: item["index"]):
        if item["index"] == 7:
            yield _lost(7, RejectStage.DEDUP, "duplicate")
        else:
            yield item | {"split": "train" if item["index"] % 4 else "validation"}


def rollout(config: RunConfig, item: Any) -> Iterator[Any]:
    delay = float(os.environ.get("TINY_DELAY_S", "0"))
    yield item | {
        "trajectories": {"reference": _work(config, "trajectories", item["index"], delay)}
    }
    if item["index"] % 2:
        yield _lost(item["index"], RejectStage.ROLLOUT, "unsupported", TrajectoryKind.OPTIMIZED)


def rows(config: RunConfig, item: Any) -> Iterator[Any]:
    yield item | {"files": [["problems", item["split"], 0], ["trajectories", item["split"], 0]]}


def write_shard(config: RunConfig, pair: Any) -> Iterator[Any]:
    (name, split, number), items = pair
    found = sorted(json.dumps(item, sort_keys=True) for item in items if item is not None)
    if not config.output.startswith("memory"):
        folder = f"{config.output}/{name}"
        os.makedirs(folder, exist_ok=True)
        with open(f"{folder}/{split}-{number}.jsonl", "w") as file:
            file.writelines(line + "\n" for line in found)
    yield {"file": f"{name}/{split}-{number}", "rows": len(found)}


def finish(config: RunConfig, _: Any, kept: Any, rejected: Any, files: Any) -> Iterator[Any]:
    reasons: dict[str, dict[str, int]] = {}
    for row in rejected:
        if row["kind"] is None:
            found = reasons.setdefault(row["stage"], {})
            found[row["reason"]] = found.get(row["reason"], 0) + 1
    record = {
        "candidates": config.num_problems,
        "kept": len(kept),
        "stages": [
            {"stage": stage, "entered": 0, "kept": 0, "rejected": found}
            for stage, found in reasons.items()
        ],
        "configs": {file["file"]: {"rows": {"all": file["rows"]}, "refused": {}} for file in files},
        "results": {},
        "seconds": {"total": 1.0},
        "lease_share": None,
    }
    if not config.output.startswith("memory"):
        with open(f"{config.output}/run.json", "w") as file:
            json.dump(record, file)
    yield record
