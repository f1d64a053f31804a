"""Simplified indices equal what they simplify, by brute force."""

from __future__ import annotations

import itertools
import random

from kernel_agent.expert.index import Index, Var, bound, delinearize, evaluate, lift, linearize, var


def _random_index(rng: random.Random, depth: int, names: list[Index]) -> tuple[Index, str]:
    """A random index, and the same thing as Python text."""
    if depth == 0:
        pick = rng.randrange(len(names) + 1)
        if pick == len(names):
            number = rng.randrange(12)
            return lift(number), str(number)
        return names[pick], "abc"[pick]
    left, left_text = _random_index(rng, depth - 1, names)
    number = rng.choice([1, 2, 3, 4, 6, 8, 12])
    kind = rng.randrange(5)
    if kind == 0:
        return left * number, f"({left_text}) * {number}"
    if kind == 1:
        return left // number, f"({left_text}) // {number}"
    if kind == 2:
        return left % number, f"({left_text}) % {number}"
    right, right_text = _random_index(rng, depth - 1, names)
    if kind == 3:
        return left - right, f"({left_text}) - ({right_text})"
    return left + right, f"({left_text}) + ({right_text})"


def test_simplification_keeps_the_value_and_bounds_hold() -> None:
    rng = random.Random(7)
    sizes = (4, 3, 6)
    names = [var(name, size) for name, size in zip("abc", sizes, strict=True)]
    for _ in range(400):
        index, text = _random_index(rng, 4, names)
        low, high = index.bounds
        code = compile(text, "index", "eval")
        for a, b, c in itertools.product(*map(range, sizes)):
            expected = eval(code, {"a": a, "b": b, "c": c})
            values = {Var("a", 4): a, Var("b", 3): b, Var("c", 6): c}
            assert evaluate(index, values) == expected, text
            assert low <= expected <= high, text


def test_reshape_there_and_back_leaves_plain_loops() -> None:
    shape, other = (4, 6, 8), (2, 2, 48)
    place = tuple(var(n, s) for n, s in zip("abc", shape, strict=True))
    there = delinearize(linearize(place, shape), other)
    assert linearize(there, other) == linearize(place, shape)
    assert delinearize(linearize(place, shape), shape) == place


def test_bounds_are_needed_only_where_a_range_leaves_them() -> None:
    i = var("i", 10)
    assert bound(i, 0, 10) == ()
    assert len(bound(i - 1, 0, 10)) == 1
