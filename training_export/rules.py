"""Which config takes what: settings, reasons, and one generator of refusals per kind of row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from schemas.records import Admission, Neighbour, Trajectory
from training_export import messages, rewards

SPEED_HEADROOM = 1.2
"""From this headroom on a problem is in the speed split."""


class SftRule(StrEnum):
    """Which correct trajectories are worth imitating, by the verdict on their best solution."""

    CORRECT = "correct"
    FASTER_THAN_EAGER = "faster_than_eager"
    FASTER_THAN_COMPILE = "faster_than_compile"


class ExportReason(StrEnum):
    """Why a config did not take a row."""

    NEAR_MISS = "near_miss"  # the problem is one operator away from a KernelBench problem
    NO_HEADROOM = "no_headroom"  # outside the speed split: nothing to win for a speed reward
    MALFORMED = "malformed"  # the rollout cannot be told as a chat
    ENVIRONMENT_ERROR = "environment_error"  # the harness failed: there is no reward
    NOT_CORRECT = "not_correct"  # no solution passed
    UNMEASURED = "unmeasured"  # right, but the timing did not hold still: no speed to speak of
    SCHEMA_VIOLATION = "schema_violation"  # a call that no tool takes
    LOOPING = "looping"  # the same step over and over
    NOT_FASTER_THAN_EAGER = "not_faster_than_eager"
    NOT_FASTER_THAN_COMPILE = "not_faster_than_compile"


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """What the configs take."""

    tools: str
    """JSON list of the tool definitions the policy saw: a column of the chat configs, and calls
    are held to it."""

    sft_rule: SftRule = SftRule.FASTER_THAN_EAGER
    """`sft` takes a trajectory, of either kind, whose best solution clears this."""

    keep_near_misses: bool = False
    """True: training configs take near misses of KernelBench problems too."""


Refusal = tuple[ExportReason, str]
"""A reason and its detail."""


def in_speed_split(admission: Admission) -> bool:
    """True when the roofline leaves something to win over torch.compile."""
    return admission.headroom is not None and admission.headroom >= SPEED_HEADROOM


def refuse_problem(
    config: str, admission: Admission, neighbour: Neighbour, settings: ExportSettings
) -> Iterator[Refusal]:
    """`ppo_warmup` takes every problem, `rl` the speed split; neither takes near misses."""
    yield from _refuse_near_miss(neighbour, settings)
    if config == "rl" and not in_speed_split(admission):
        yield ExportReason.NO_HEADROOM, f"headroom {admission.headroom}, needs {SPEED_HEADROOM}"


def refuse_trajectory(trajectory: Trajectory) -> Iterator[Refusal]:
    """`trajectories` takes whatever can be told as a chat."""
    if (detail := messages.malformed(trajectory)) is not None:
        yield ExportReason.MALFORMED, detail


def refuse_critic(
    trajectory: Trajectory, neighbour: Neighbour, settings: ExportSettings
) -> Iterator[Refusal]:
    """The critic learns from failures, loops and wrong calls too, but needs an outcome."""
    yield from refuse_trajectory(trajectory)
    yield from _refuse_near_miss(neighbour, settings)
    if rewards.trajectory_reward(trajectory) is None:
        yield ExportReason.ENVIRONMENT_ERROR, trajectory.detail


def refuse_sft(
    trajectory: Trajectory, neighbour: Neighbour, settings: ExportSettings
) -> Iterator[Refusal]:
    """`sft` takes correct rollouts that clear the rule, without loops or calls no tool takes."""
    yield from refuse_critic(trajectory, neighbour, settings)
    verdict = trajectory.verdict
    if verdict is None:
        yield ExportReason.NOT_CORRECT, str(trajectory.stop_reason)
        return
    if not verdict.correct:
        yield ExportReason.UNMEASURED, verdict.reason
    if (detail := messages.schema_violation(trajectory, settings.tools)) is not None:
        yield ExportReason.SCHEMA_VIOLATION, detail
    if (detail := messages.looping(trajectory)) is not None:
        yield ExportReason.LOOPING, detail
    reason, speedup = {
        SftRule.CORRECT: (None, None),
        SftRule.FASTER_THAN_EAGER: (ExportReason.NOT_FASTER_THAN_EAGER, verdict.speedup_eager),
        SftRule.FASTER_THAN_COMPILE: (
            ExportReason.NOT_FASTER_THAN_COMPILE,
            verdict.speedup_compile,
        ),
    }[settings.sft_rule]
    if reason is not None and speedup is not None and not rewards.faster(speedup):
        yield reason, f"speedup {speedup.low:.3f} to {speedup.high:.3f}"


def _refuse_near_miss(neighbour: Neighbour, settings: ExportSettings) -> Iterator[Refusal]:
    if neighbour.near_miss and not settings.keep_near_misses:
        detail = f"{neighbour.kernelbench_id} at {neighbour.kernelbench_similarity:.3f}"
        yield ExportReason.NEAR_MISS, detail
