"""What a run was and did, as the dict behind `run.json`, the card and the report.

The numbers have to add up before anything is published:

    candidates = kept problems + problems lost        (compose, admit, decontaminate, dedup)
    rollouts   = trajectories + rollouts lost         (rollout)
    kept problems = rows + rows refused               (problems, ppo_warmup, rl)
    trajectories  = rows + rows refused               (trajectories, sft, critic)
"""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from schemas.arrow import SCHEMAS
from schemas.codec import to_json
from schemas.records import SCHEMA_VERSION, Environment, Rejection, RejectStage

Losses = Mapping[tuple[str, str, str | None], int]
"""How many rejections there are of each (stage, reason, kind)."""

PROBLEM_STAGES = (
    RejectStage.COMPOSE,
    RejectStage.ADMIT,
    RejectStage.DECONTAMINATE,
    RejectStage.DEDUP,
)
"""The stages that lose problems, in the order of the flow."""

_OF_PROBLEMS = ("problems", "ppo_warmup", "rl")
_PACKAGES = ("apache-beam", "datasets", "numpy", "pyarrow", "torch", "triton")


def count_losses(rejections: Iterable[Rejection]) -> Counter[tuple[str, str, str | None]]:
    """Rejections by (stage, reason, kind)."""
    return Counter((str(r.stage), r.reason, r.kind and str(r.kind)) for r in rejections)


def build_run_record(
    *,
    command: Sequence[str],
    seed: int,
    started: str,
    commit: str | None,
    device: Environment,
    settings: Mapping[str, Any],
    candidates: int,
    kept: int,
    rollouts: int,
    trajectories: int,
    losses: Losses,
    rows: Mapping[str, Mapping[str, int]],
    seconds: Mapping[str, float],
    lease_share: float | None,
) -> dict[str, Any]:
    """The run as plain JSON values.

    `losses` counts every row of `rejected`, export's included; `rows` is {config: {split: rows}};
    `seconds` is wall time per stage; `lease_share` is the share of the wall time during which the
    device was held for a measurement. A rollout ends as a trajectory or as a rejection, not both.
    Raises ValueError with both sides when a sum does not add up.
    """
    configs = _configs(kept, trajectories, losses, rows)
    return {
        "schema_version": SCHEMA_VERSION,
        "command": list(command),
        "seed": seed,
        "started": started,
        "commit": commit,
        "versions": versions(),
        "device": to_json(device),
        "settings": to_json(dict(settings)),
        "candidates": candidates,
        "kept": kept,
        "rollouts": rollouts,
        "trajectories": trajectories,
        "stages": _stages(candidates, kept, rollouts, trajectories, losses),
        "configs": configs,
        "seconds": dict(seconds),
        "lease_share": lease_share,
    }


def _stages(
    candidates: int, kept: int, rollouts: int, trajectories: int, losses: Losses
) -> list[dict[str, Any]]:
    stages, left = [], candidates
    for stage in PROBLEM_STAGES:
        reasons = _reasons(losses, stage, of_trajectories=False)
        stages.append(_stage(stage, left, reasons))
        left -= sum(reasons.values())
    if left != kept:
        raise ValueError(
            f"candidates = kept + rejected does not hold: {candidates} candidates, {kept} kept, "
            f"{candidates - left} rejected; {left - kept:+d} problems are unaccounted for"
        )
    lost = _reasons(losses, RejectStage.ROLLOUT, of_trajectories=True)
    if rollouts != trajectories + sum(lost.values()):
        raise ValueError(
            f"rollouts = trajectories + lost does not hold: {rollouts} rollouts, "
            f"{trajectories} trajectories, {sum(lost.values())} lost"
        )
    return [*stages, _stage(RejectStage.ROLLOUT, rollouts, lost)]


def _stage(stage: str, entered: int, reasons: dict[str, int]) -> dict[str, Any]:
    left = entered - sum(reasons.values())
    return {"stage": str(stage), "entered": entered, "kept": left, "rejected": reasons}


def _reasons(losses: Losses, stage: str, *, of_trajectories: bool) -> dict[str, int]:
    """Losses of one stage by reason, most frequent first. Raises ValueError on the wrong kind."""
    found: Counter[str] = Counter()
    for (where, reason, kind), count in losses.items():
        if where != stage:
            continue
        if (kind is not None) != of_trajectories:
            want = "a kind" if of_trajectories else "no kind"
            raise ValueError(f"a rejection at {stage} ({reason}) needs {want}, got {kind!r}")
        found[reason] += count
    return _by_count(found)


def _configs(
    kept: int, trajectories: int, losses: Losses, rows: Mapping[str, Mapping[str, int]]
) -> dict[str, Any]:
    refused: dict[str, dict[str, int]] = {config: {} for config in SCHEMAS}
    for (stage, reason, _), count in losses.items():
        if stage == RejectStage.EXPORT:
            config, _, why = reason.partition(".")
            if config not in refused or not why:
                raise ValueError(f"a rejection at export needs config.reason, got {reason!r}")
            refused[config][why] = refused[config].get(why, 0) + count
    for config in SCHEMAS:
        whole = kept if config in _OF_PROBLEMS else trajectories
        if config == "rejected":
            whole = sum(losses.values())
        have, lost = sum(rows[config].values()), sum(refused[config].values())
        if have + lost != whole:
            raise ValueError(f"{config}: {have} rows + {lost} refused, expected {whole} in all")
    return {c: {"rows": dict(rows[c]), "refused": _by_count(refused[c])} for c in SCHEMAS}


def _by_count(reasons: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0])))


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that shape the data, of those installed."""
    installed = {package: version_of(package) for package in _PACKAGES}
    return {"python": platform.python_version(), **{k: v for k, v in installed.items() if v}}


def version_of(package: str) -> str | None:
    """The version that is installed; None where none is."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_commit(folder: str) -> str | None:
    """Commit of the checkout at `folder`, with `-dirty` when files differ; None outside of one."""
    try:
        head = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head}-dirty" if changed else head


def _git(folder: str, *arguments: str) -> str:
    command = ["git", "-C", folder, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
