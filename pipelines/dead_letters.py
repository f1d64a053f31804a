"""Bugs of ours as rows: an exception that escapes a stage costs one element, loudly."""

from __future__ import annotations

import traceback

from schemas.records import Rejection, RejectStage, TrajectoryKind

INTERNAL_ERROR = "internal_error"


def internal_error(
    error: Exception,
    *,
    stage: RejectStage,
    problem_id: str,
    index: int,
    kind: TrajectoryKind | None = None,
    config: str | None = None,
) -> Rejection:
    """The dead letter of an element: the exception's type, the last line of its text, and where it
    was raised. `kind` and `config` say that only that trajectory or that config lost it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({_short(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    last_line = (str(error).strip().splitlines() or [""])[-1]
    return Rejection(
        problem_id=problem_id,
        stage=stage,
        reason=f"{config}.{INTERNAL_ERROR}" if config else INTERNAL_ERROR,
        detail=f"{type(error).__name__}: {last_line}{place}",
        kind=kind,
        index=index,
    )


def _short(filename: str) -> str:
    """Room and file alone: rows are published, and where somebody's checkout lies is theirs."""
    return "/".join(filename.rsplit("/", 2)[-2:])


def is_internal(reason: str) -> bool:
    """Whether a reason, as it stands in a row or in `run.json`, is a bug of ours."""
    return reason.rpartition(".")[2] == INTERNAL_ERROR
