"""A whole export of hand-sized records, for the tests of its shards and of its documents."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas.records import RejectStage, TrajectoryKind
from tests import factories
from training_export import shards
from training_export.finish import finish
from training_export.rows import (
    AgentPrompt,
    Placed,
    rows_of_problem,
    rows_of_rejection,
    rows_of_trajectory,
)
from training_export.rules import ExportSettings
from training_export.run_record import build_run_record

SETTINGS = ExportSettings(tools=factories.TOOLS)


@dataclass(frozen=True, kw_only=True)
class Flow:
    """Hand-sized records of a run and the rows they become."""

    placed: list[Placed]
    candidates: int
    kept: int
    rollouts: int
    trajectories: int
    losses: Counter[tuple[str, str, str | None]]


def make_flow(num_train: int = 3, num_validation: int = 1) -> Flow:
    """Kept problems, each with a slow reference and a fast optimized rollout.

    Two more problems and one rollout are lost.
    """
    placed: list[Placed] = []
    rejections = [
        factories.rejection(100),
        factories.rejection(101, stage=RejectStage.DEDUP, reason="duplicate"),
    ]
    trajectories = 0
    for i in range(num_train + num_validation):
        kept = factories.kept(i, split="train" if i < num_train else "validation")
        parts = (kept.problem, kept.admission, kept.neighbour)
        prompt = AgentPrompt(system="You are an agent.", user=kept.problem.code)
        placed += rows_of_problem(*parts, prompt, SETTINGS)
        for kind, speedup in ((TrajectoryKind.REFERENCE, 0.5), (TrajectoryKind.OPTIMIZED, 2.0)):
            if i == 0 and kind is TrajectoryKind.REFERENCE:
                lost = {"stage": RejectStage.ROLLOUT, "reason": "unsupported", "kind": kind}
                rejections.append(
                    factories.rejection(i, problem_id=kept.problem.problem_id, **lost)
                )
                continue
            best = factories.verdict(eager=2 * speedup, compile=speedup)
            rollout = factories.trajectory(kept, best, kind=kind)
            placed += rows_of_trajectory(*parts, rollout, SETTINGS)
            trajectories += 1
    for rejection in rejections:
        placed += rows_of_rejection(rejection)
    losses = Counter(
        (row["stage"], row["reason"], row["kind"])
        for config, _, row in placed
        if config == "rejected"
    )
    kept_count = num_train + num_validation
    return Flow(
        placed=placed,
        candidates=kept_count + 2,
        kept=kept_count,
        rollouts=2 * kept_count,
        trajectories=trajectories,
        losses=losses,
    )


def record(flow: Flow, written: list[shards.Shard], **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "command": ["python", "-m", "pipelines.ops6k", "--target=cpu"],
        "seed": 7,
        "started": "2026-11-30T12:00:00+00:00",
        "commit": "0123abc",
        "device": factories.environment(),
        "settings": {"sft_rule": SETTINGS.sft_rule},
        "candidates": flow.candidates,
        "kept": flow.kept,
        "rollouts": flow.rollouts,
        "trajectories": flow.trajectories,
        "losses": flow.losses,
        "rows": shards.rows_written(written),
        "seconds": {"compose": 1.0, "admit": 20.0},
        "lease_share": 0.4,
    }
    return build_run_record(**values | changes)


def export(root: Path, flow: Flow, num_shards: dict[str, int] | None = None) -> dict[str, Any]:
    folder = str(root)
    shards.begin(folder)
    written = shards.write_rows(folder, flow.placed, num_shards or {})
    run = record(flow, written)
    finish(folder, [shard.file for shard in written], run)
    return run


def contents(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}
