"""From samples to believable ratios: the judge's half of timing.

One measurement is a number of rounds. In each round every side runs a few calls, in an order
that turns round from one round to the next (E C A S, then S A C E), so that heat, clocks and
other drift fall on all sides alike. A round gives one ratio per pair; the ratio reported is the
median over rounds (an interrupted round is one vote) with its 95 % bootstrap interval over rounds.
The `compile` side runs twice in every round: the ratio of its two halves is the A/A control, which
must be 1.

How many calls a round has follows from the baseline's time only: the solution must not choose
how long it is watched.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np

from schemas.records import Interval, Measurement

ROUNDS = {"reward": 8, "publish": 20}
AA_TOLERANCE = {"cpu": 0.10, "cuda": 0.03}
"""How far from 1 the A/A control may lie: a CPU shared with an operating system is noisier."""
ROUND_MS = {"cpu": 10.0, "cuda": 5.0}
"""What varies on a GPU varies from round to round: a second half of the calls of a round makes the
interval a tenth narrower and takes as long as the first."""
BOOTSTRAP_SAMPLES = 2000
PROCESSES = {"reward": 1, "publish": 5}
"""Processes of the solution that its times come from."""
READY_SLACK_MS, READY_SHARE = {"cpu": 1.0, "cuda": 0.08}, 0.25
"""How much longer than copying it takes reading an output may take, in milliseconds or as a share
of the solution's time, whichever is more."""
CALL_SLACK_MS, CALL_SHARE = {"cpu": 0.05, "cuda": 0.06}, 0.03
"""How much more than the solution's clock the judge's may say, in milliseconds or as a share."""
BARE_SLACK_MS, BARE_SHARE = 0.08, 0.05
"""The same for bare calls, of which the judge's clock sees the launch too: launches differ."""
BUSY_SLACK_MS, BUSY_SHARE = 0.1, 0.15
"""How much less than the device was busy with one of its calls a solution may claim."""
DRIFT, DRIFT_SLACK_MS = {"cpu": 3.0, "cuda": 1.2}, 0.05
"""How much slower than at admission a baseline may be, as a factor and beyond that in milliseconds:
a chain of short kernels is as fast as it is launched, which a busy CPU makes slower. Where the CPU
is timed this is about the machine alone, since the solution stands still meanwhile."""


def calls_per_round(baseline_ms: float, target: str) -> int:
    """Calls of one side in a round: about ROUND_MS worth, at least 2 and at most 6."""
    return max(2, min(6, round(ROUND_MS[target] / baseline_ms)))


def order(sides: Sequence[str], round_index: int) -> list[str]:
    """The order of sides in a round: there and back again."""
    return list(sides) if round_index % 2 == 0 else list(reversed(sides))


def measurement(rounds: Sequence[Sequence[float]], clock: str) -> Measurement:
    """All samples of one side; its time is the median over rounds of the rounds' medians."""
    medians = [statistics.median(samples) for samples in rounds]
    return Measurement(
        median_ms=statistics.median(medians),
        samples_ms=tuple(round(sample, 6) for samples in rounds for sample in samples),
        clock=clock,
    )


def speedup(
    baseline: Sequence[Sequence[float]], solution: Sequence[Sequence[float]], seed: int = 0
) -> Interval:
    """Baseline time / solution time over paired rounds, with its 95 % bootstrap interval."""
    logs = np.array(
        [
            math.log(statistics.median(b) / statistics.median(s))
            for b, s in zip(baseline, solution, strict=True)
        ]
    )
    picks = np.random.default_rng(seed).integers(0, len(logs), (BOOTSTRAP_SAMPLES, len(logs)))
    low, high = np.quantile(np.median(logs[picks], axis=1), [0.025, 0.975])
    point = float(np.exp(np.median(logs)))
    return Interval(
        low=min(float(np.exp(low)), point), point=point, high=max(float(np.exp(high)), point)
    )


def unclaimed_ms(seen_ms: float, claimed_ms: float, slack_ms: float, share: float) -> float:
    """What a solution has to be charged on top of what it claims, by another clock.

    0 while that clock says no more than `slack_ms`, or `share` of the claim, above it: clocks of
    other processes are coarse. Beyond that all of the difference, never less.
    """
    more_ms = seen_ms - claimed_ms
    return more_ms if more_ms > max(slack_ms, share * claimed_ms) else 0.0
