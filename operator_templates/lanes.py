"""How each kind of operator maps the lanes (64 sampled elements) of its inputs to those of its
output.

A rule is a function `Call -> Lanes`. Everything here is plain Python on fixed pseudo-random index
tables, so that a problem is composed alike on any machine. Results are rounded to six digits: libm
differs in the last bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from random import Random
from statistics import NormalDist

from operator_templates.values import Call, Lanes, mean, rms, std

LANES = 64
SAMPLE = 16  # lanes that stand for a sum over many elements
EXTREME_SAMPLE = 32  # lanes that stand for a maximum over many elements

Rule = Callable[[Call], Lanes]


@functools.cache
def order(salt: str) -> tuple[int, ...]:
    """A fixed permutation of the lanes."""
    indices = list(range(LANES))
    Random(f"lanes/{salt}").shuffle(indices)
    return tuple(indices)


@functools.cache
def groups(salt: str, size: int) -> tuple[tuple[int, ...], ...]:
    """For every output lane, the `size` input lanes it is made of."""
    rng = Random(f"groups/{salt}/{size}")
    return tuple(tuple(rng.sample(range(LANES), size)) for _ in range(LANES))


@functools.cache
def normal(salt: str) -> Lanes:
    """Standard normal lanes."""
    return tuple(NormalDist().inv_cdf((i + 0.5) / LANES) for i in order(salt))


@functools.cache
def uniform(salt: str) -> Lanes:
    """Lanes in (0, 1)."""
    return tuple((i + 0.5) / LANES for i in order(salt))


def rounded(values: Sequence[float]) -> Lanes:
    return tuple(float(f"{v:.6g}") for v in values)


def pointwise(function: Callable[..., float]) -> Rule:
    """Lane by lane: `function(x, [y, ...], call)`. Where it is undefined the lane becomes NaN."""

    def rule(call: Call) -> Lanes:
        def at(*xs: float) -> float:
            try:
                return function(*xs, call)
            except (ValueError, OverflowError, ZeroDivisionError):
                return math.nan

        return rounded([at(*xs) for xs in zip(*(v.lanes for v in call.inputs), strict=True)])

    return rule


def same(call: Call) -> Lanes:
    """Elements keep their values and their places (pads, copies, upsampling)."""
    return call.x.lanes


def shuffled(call: Call) -> Lanes:
    """Elements keep their values, at other places."""
    return tuple(call.x.lanes[i] for i in order(f"{call.salt}/shuffled"))


def picked(call: Call) -> Lanes:
    """Elements of the first operand at the places the second one names."""
    x, index = call.x.lanes, call.inputs[1].lanes
    return tuple(x[int(u * LANES) % LANES] for u in index)


def statistic(function: Callable[[Lanes], float], count: Callable[[Call], int]) -> Rule:
    """A statistic of `count` elements, estimated from samples and drawn together as 1/sqrt(count)
    demands.
    """

    def rule(call: Call) -> Lanes:
        n = count(call)
        size = min(n, SAMPLE)
        shrink = math.sqrt(size / n)
        x = call.x.lanes
        samples = [function(tuple(x[j] for j in g)) for g in groups(call.salt, size)]
        # Small groups bias estimates of spread; the whole sample gives the better centre.
        centre = function(x) if n > SAMPLE else math.fsum(samples) / LANES
        middle = math.fsum(samples) / LANES
        return rounded([centre + (s - middle) * shrink for s in samples])

    return rule


def scaled(rule: Rule, factor: Callable[[Call], float]) -> Rule:
    """`rule` times a factor known from shapes and attributes."""
    return lambda call: rounded([v * factor(call) for v in rule(call)])


def extreme(pick: Callable[[Sequence[float]], float], count: Callable[[Call], int]) -> Rule:
    """The largest or smallest of `count` elements. Bounded inputs collapse, as they should."""

    def rule(call: Call) -> Lanes:
        size = min(count(call), EXTREME_SAMPLE)
        return rounded([pick([call.x.lanes[j] for j in g]) for g in groups(call.salt, size)])

    return rule


def dot(x: Lanes, w: Lanes, fan_in: int, salt: str) -> Lanes:
    """Sums of `fan_in` products of independent elements of x and w."""
    size = min(fan_in, SAMPLE)
    grow = math.sqrt(fan_in / size)
    mean_product = mean(x) * mean(w)
    left, right = groups(f"{salt}/left", size), groups(f"{salt}/right", size)
    return rounded(
        [
            fan_in * mean_product
            + grow * math.fsum(x[a] * w[b] - mean_product for a, b in zip(ga, gb, strict=True))
            for ga, gb in zip(left, right, strict=True)
        ]
    )


def weighted(
    fan_in: Callable[[Call], int], *, bias: bool, weight_fan: Callable[[Call], int] | None = None
) -> Rule:
    """Linear and convolution layers with PyTorch's default weights, uniform with variance 1 / (3
    fan_in).

    `weight_fan` overrides the fan that PyTorch initialises by, where it differs from the number of
    terms.
    """

    def rule(call: Call) -> Lanes:
        n = fan_in(call)
        bound = math.sqrt(1.0 / (weight_fan or fan_in)(call))
        w = tuple(bound * (2 * u - 1) for u in uniform(f"{call.salt}/weight"))
        out = dot(call.x.lanes, w, n, call.salt)
        if not bias:
            return out
        b = uniform(f"{call.salt}/bias")
        return rounded([v + bound * (2 * u - 1) for v, u in zip(out, b, strict=True)])

    return rule


def affine(values: Sequence[float], salt: str) -> Lanes:
    """A learned gain and offset, as they look once parameters are no longer at their initial ones
    and zeros.
    """
    gain, offset = normal(f"{salt}/gain"), normal(f"{salt}/offset")
    return rounded(
        [v * (1 + 0.25 * g) + 0.25 * o for v, g, o in zip(values, gain, offset, strict=True)]
    )


def normalised(*, learned: bool, centre: bool = True) -> Rule:
    """(x - mean) / std, or x / rms, with or without a learned gain and offset."""

    def rule(call: Call) -> Lanes:
        x = call.x.lanes
        shift, scale = (mean(x), std(x)) if centre else (0.0, rms(x))
        out = rounded([(v - shift) / max(scale, 1e-12) for v in x])
        return affine(out, call.salt) if learned else out

    return rule


def scanned(length: Callable[[Call], int]) -> Rule:
    """A running sum along `length` elements, at positions spread over it."""

    def rule(call: Call) -> Lanes:
        x, centre = call.x.lanes, mean(call.x.lanes)
        steps = [max(1.0, length(call) * u) for u in uniform(f"{call.salt}/steps")]
        parts = groups(call.salt, SAMPLE)
        drift = [math.fsum(x[j] - centre for j in g) / math.sqrt(SAMPLE) for g in parts]
        return rounded([centre * t + d * math.sqrt(t) for t, d in zip(steps, drift, strict=True)])

    return rule
