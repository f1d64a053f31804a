"""What a policy is: something that plays a rollout, one action at a time.

Task      what it is given: problem, device, kind of trajectory, the files to start from
Action    what it does next: a thought and tool calls; no calls means it is done
Feedback  what came back: one observation per call, and the last verdict
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol

from schemas.records import Layer, Problem, ToolCall, TrajectoryKind, Verdict


@dataclass(frozen=True, kw_only=True)
class Task:
    """One rollout to play. `files` is the workspace at the start."""

    problem: Problem
    device: str
    kind: TrajectoryKind
    files: dict[str, str]
    start: Verdict | None
    """The verdict on `files`, when there is one."""


@dataclass(frozen=True, kw_only=True)
class Action:
    thought: str
    calls: tuple[ToolCall, ...]
    layer: Layer | None = None


@dataclass(frozen=True, kw_only=True)
class Feedback:
    observations: tuple[str, ...]
    verdict: Verdict | None


class Unsupported(Exception):
    """The policy cannot handle this problem, and why. The trajectory is lost, not the problem."""


class Policy(Protocol):
    """`play` yields actions and is sent the feedback to each; it may raise Unsupported first."""

    @property
    def name(self) -> str:
        """Name and version: a trajectory of another version is another trajectory."""

    def play(self, task: Task) -> Generator[Action, Feedback, None]: ...
