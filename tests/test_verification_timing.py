"""Ratios and clocks, on numbers small enough to check by hand."""

from __future__ import annotations

import math

import pytest

from verification import timing


def test_speedup_is_the_median_of_the_rounds_ratios() -> None:
    found = timing.speedup([[2.0], [8.0]], [[1.0], [1.0]])
    assert found.point == pytest.approx(4.0)
    assert found.low == pytest.approx(2.0)
    assert found.high == pytest.approx(8.0)


def test_one_interrupted_round_is_one_vote() -> None:
    found = timing.speedup([[2.0]] * 8, [[1.0]] * 7 + [[50.0]])
    assert found.point == pytest.approx(2.0)


def test_one_interrupted_call_in_a_round_does_not_matter() -> None:
    steady = timing.speedup([[2.0, 2.0, 2.0]] * 8, [[1.0, 1.0, 90.0]] * 8)
    assert steady.point == pytest.approx(2.0)
    assert steady.low == pytest.approx(2.0)


def test_drift_that_hits_both_sides_cancels() -> None:
    drift = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
    found = timing.speedup([[3.0 * d] for d in drift], [[2.0 * d] for d in drift])
    assert found.low == pytest.approx(1.5)
    assert found.high == pytest.approx(1.5)


def test_the_interval_widens_with_noise_and_is_the_same_every_time() -> None:
    noisy = [[1.0], [2.0], [1.5], [0.8], [1.2], [1.9], [1.1], [1.4]]
    one = timing.speedup(noisy, [[1.0]] * 8)
    assert one.low < one.point < one.high
    assert timing.speedup(noisy, [[1.0]] * 8) == one


@pytest.mark.parametrize(
    ("seen_ms", "claimed_ms", "more_ms"),
    [
        (1.0, 1.0, 0.0),
        (0.7, 1.0, 0.0),  # the coarser clock is no gift
        (1.04, 1.0, 0.0),  # within the slack
        (1.06, 1.0, 0.06),  # beyond it, all of it
        (10.2, 10.0, 0.0),  # 2 % of a long call
        (10.4, 10.0, 0.4),
        (2.0, 0.001, 1.999),
    ],
)
def test_the_slower_clock_wins(seen_ms: float, claimed_ms: float, more_ms: float) -> None:
    found = timing.unclaimed_ms(seen_ms, claimed_ms, slack_ms=0.05, share=0.03)
    assert found == pytest.approx(more_ms)


def test_the_order_turns_round() -> None:
    assert timing.order(["a", "b", "c"], 0) == ["a", "b", "c"]
    assert timing.order(["a", "b", "c"], 1) == ["c", "b", "a"]


@pytest.mark.parametrize(("baseline_ms", "calls"), [(0.01, 6), (2.5, 4), (100.0, 2)])
def test_calls_follow_from_the_baseline(baseline_ms: float, calls: int) -> None:
    assert timing.calls_per_round(baseline_ms, "cpu") == calls
    assert 2 <= timing.calls_per_round(baseline_ms, "cuda") <= calls


def test_the_median_of_rounds() -> None:
    found = timing.measurement([[1.0, 9.0, 2.0], [3.0, 3.0, 3.0], [7.0, 4.0, 5.0]], "perf_counter")
    assert found.median_ms == 3.0
    assert found.samples_ms == (1.0, 9.0, 2.0, 3.0, 3.0, 3.0, 7.0, 4.0, 5.0)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
def test_impossible_times_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite and positive"):
        timing.measurement([[1.0, 1.0, bad]], "perf_counter")
