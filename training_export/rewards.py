"""Rewards and returns, as functions of verdicts: recomputable from a row, without measuring again.

Equation 1 of the CUDA Agent paper (arXiv 2602.24286):

    -1  the correctness check fails
     3  faster than eager and faster than torch.compile
     2  faster than eager
     1  correct otherwise

where faster means (t0 - t) / t0 > 5 %. The paper takes the measured times; here the lower end of
the 95 % interval of t0 / t has to clear the threshold, so that a lucky sample is not a win.
"""

from __future__ import annotations

from collections.abc import Sequence

from schemas.records import Interval, StopReason, Trajectory, Turn, Verdict, VerdictStatus

THRESHOLD = 0.05
"""Share of the baseline's time that a win saves."""

MIN_SPEEDUP = 1.0 / (1.0 - THRESHOLD)
"""The same as a speedup: (t0 - t) / t0 > THRESHOLD when t0 / t > MIN_SPEEDUP."""

_FAILED, _CORRECT, _FASTER_THAN_EAGER, _FASTER_THAN_BOTH = -1.0, 1.0, 2.0, 3.0


def faster(speedup: Interval | None) -> bool:
    """True when even the lower end of the interval saves more than 5 % of the baseline's time."""
    return speedup is not None and speedup.low > MIN_SPEEDUP


def reward(verdict: Verdict) -> float | None:
    """-1, 1, 2 or 3, by the table above.

    An UNMEASURED verdict passed every check, which is worth 1, and has no speedup, so it is never
    a win. None for REFERENCE_ERROR: the harness failed, which says nothing about the solution.
    """
    if verdict.status is VerdictStatus.REFERENCE_ERROR:
        return None
    if verdict.status not in (VerdictStatus.CORRECT, VerdictStatus.UNMEASURED):
        return _FAILED
    if not faster(verdict.speedup_eager):
        return _CORRECT
    return _FASTER_THAN_BOTH if faster(verdict.speedup_compile) else _FASTER_THAN_EAGER


def turn_reward(turn: Turn) -> float | None:
    """Reward of the verdict a turn led to; None when it led to none."""
    return None if turn.verdict is None else reward(turn.verdict)


def trajectory_reward(trajectory: Trajectory) -> float | None:
    """Outcome of a rollout: the reward of its best solution, -1 when it showed no correct one.

    None when the harness failed (stop reason `environment_error`, or every verdict a
    `reference_error`).
    """
    if trajectory.verdict is not None:
        return reward(trajectory.verdict)
    if trajectory.stop_reason is StopReason.ENVIRONMENT_ERROR:
        return None
    verdicts = [turn.verdict for turn in trajectory.turns if turn.verdict is not None]
    if not verdicts:
        return _FAILED
    return max((r for v in verdicts if (r := reward(v)) is not None), default=None)


def outcome_rewards(outcome: float, num_turns: int) -> list[float]:
    """Rewards [num_turns]: the outcome at the last turn, zero before. ValueError without turns."""
    if num_turns < 1:
        raise ValueError(f"expected at least one turn to reward, got {num_turns}")
    return [0.0] * (num_turns - 1) + [outcome]


def returns(rewards: Sequence[float], gamma: float = 1.0) -> list[float]:
    """Returns [T] of rewards [T]: G_t = r_t + gamma * G_(t+1), with nothing after the last turn."""
    out: list[float] = []
    following = 0.0
    for value in reversed(rewards):
        following = value + gamma * following
        out.append(following)
    return out[::-1]
