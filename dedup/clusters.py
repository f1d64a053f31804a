"""Groups from similar pairs, independent of the order in which problems and pairs arrive.

Two kinds, for two needs:

    leaders      each member is directly similar to its keeper; decides what is dropped, so
                 nothing is lost to a chain of small steps
    components   no similar pair is ever parted; decides the split, so nothing leaks across it
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from dedup.join import Pair


def leaders(ranks: Sequence[Any], pairs: Iterable[Pair]) -> list[tuple[int, float]]:
    """Leader clustering: (keeper, similarity to it) of every item; a keeper is its own, at 1.0.

    Items are visited by rank. One that is similar to keepers joins the most similar of them (the
    better-ranked one of equals); any other becomes a keeper. `ranks` must be distinct.
    """
    if len(set(ranks)) != len(ranks):
        raise ValueError(
            "expected distinct ranks: equal ones would make the result depend on order"
        )
    neighbours: dict[int, dict[int, float]] = defaultdict(dict)
    for left, right, similarity in pairs:
        neighbours[left][right] = similarity
        neighbours[right][left] = similarity
    keeper: dict[int, tuple[int, float]] = {}
    for item in sorted(range(len(ranks)), key=ranks.__getitem__):
        near = [
            (-s, ranks[k], k) for k, s in neighbours[item].items() if keeper.get(k, (-1,))[0] == k
        ]
        if near:
            similarity, _, best = min(near)
            keeper[item] = (best, -similarity)
        else:
            keeper[item] = (item, 1.0)
    return [keeper[item] for item in range(len(ranks))]


def components(size: int, pairs: Iterable[Pair]) -> list[int]:
    """Connected components: for each of `size` items the smallest position in its component."""
    parent = list(range(size))

    def root(item: int) -> int:
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    for left, right, _ in pairs:
        first, second = sorted((root(left), root(right)))
        parent[second] = first
    return [root(item) for item in range(size)]
