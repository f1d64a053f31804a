"""Rewards by hand, at every boundary, against the paper's own formula."""

from __future__ import annotations

import math

import pytest

from schemas.records import Interval, StopReason, VerdictStatus
from tests import factories
from training_export import rewards

EDGE = 1.0 / 0.95


def at_least(low: float) -> Interval:
    return Interval(low=low, point=low * 1.1, high=low * 1.2)


@pytest.mark.parametrize(
    ("eager_low", "compile_low", "expected"),
    [
        (2.0, 2.0, 3.0),
        (2.0, 1.0, 2.0),
        (1.0, 2.0, 1.0),  # beats compile but not eager: the paper's order of cases says 1
        (0.1, 0.1, 1.0),  # slow, but correct
        (EDGE, EDGE, 1.0),  # exactly 5 % is not more than 5 %
        (math.nextafter(EDGE, 2), EDGE, 2.0),
        (math.nextafter(EDGE, 2), math.nextafter(EDGE, 2), 3.0),
        (math.nextafter(EDGE, 0), 2.0, 1.0),
    ],
)
def test_reward_of_a_correct_verdict(eager_low: float, compile_low: float, expected: float) -> None:
    verdict = factories.verdict(eager=at_least(eager_low), compile=at_least(compile_low))
    assert rewards.reward(verdict) == expected


def test_the_lower_end_counts_not_the_point() -> None:
    wide = Interval(low=1.04, point=1.5, high=2.0)
    assert rewards.reward(factories.verdict(eager=wide, compile=wide)) == 1.0


@pytest.mark.parametrize("t", [0.2, 0.9, 0.949, 0.951, 1.0, 1.7])
def test_faster_is_the_papers_formula(t: float) -> None:
    t0 = 1.0
    exact = Interval(low=t0 / t, point=t0 / t, high=t0 / t)
    assert rewards.faster(exact) == ((t0 - t) / t0 > 0.05)


@pytest.mark.parametrize("status", [s for s in VerdictStatus if s is not VerdictStatus.CORRECT])
def test_reward_of_every_other_status(status: VerdictStatus) -> None:
    expected = {VerdictStatus.UNMEASURED: 1.0, VerdictStatus.REFERENCE_ERROR: None}
    assert rewards.reward(factories.verdict(status)) == expected.get(status, -1.0)


def test_outcome_of_a_trajectory() -> None:
    won = factories.trajectory(best=factories.verdict(eager=2.0, compile=1.0))
    lost = factories.trajectory()
    assert rewards.trajectory_reward(won) == 2.0
    assert rewards.trajectory_reward(lost) == -1.0
    assert [rewards.turn_reward(turn) for turn in won.turns] == [-1.0, 2.0]


def test_outcome_without_a_correct_solution() -> None:
    unmeasured = factories.turn(0, verdict=factories.verdict(VerdictStatus.UNMEASURED))
    ours = factories.turn(0, verdict=factories.verdict(VerdictStatus.REFERENCE_ERROR))
    silent = factories.turn(0)
    broken = StopReason.ENVIRONMENT_ERROR

    def outcome(**fields: object) -> float | None:
        return rewards.trajectory_reward(factories.trajectory(**fields))  # type: ignore[arg-type]

    assert outcome(turns=(unmeasured,)) == 1.0
    assert outcome(turns=(ours,)) is None
    assert outcome(turns=(silent,)) == -1.0
    assert outcome(turns=()) == -1.0
    assert outcome(stop_reason=broken) is None


def test_returns_by_hand_and_by_the_sum() -> None:
    assert rewards.returns([0.0, 0.0, 3.0]) == [3.0, 3.0, 3.0]
    assert rewards.returns([]) == []
    values, gamma = [1.0, -2.0, 4.0, 0.5], 0.5
    by_sum = [
        sum(gamma ** (k - t) * values[k] for k in range(t, len(values))) for t in range(len(values))
    ]
    assert rewards.returns(values, gamma) == pytest.approx(by_sum)
    assert rewards.outcome_rewards(-1.0, 3) == [0.0, 0.0, -1.0]
    with pytest.raises(ValueError, match="at least one turn"):
        rewards.outcome_rewards(1.0, 0)
