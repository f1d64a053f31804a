"""Exact Jaccard similarity between many small sets, by a sparse product of their membership
matrices.

The product of two 0/1 matrices counts shared members, and with the set sizes that is the Jaccard
similarity. Exact, and quick up to about 100,000 sets (`dedup.similar` says what happens beyond).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from scipy import sparse

ROWS_PER_BLOCK = 512
"""Rows multiplied at a time, so that the product of 100,000 sets stays under a gigabyte."""


class Pair(NamedTuple):
    """Two similar sets by position, `left < right` within one list."""

    left: int
    right: int
    similarity: float


def exact_pairs(sets: Sequence[Collection[str]], threshold: float) -> list[Pair]:
    """Every pair of `sets` with Jaccard similarity >= threshold, ordered by position.

    Raises:
        ValueError: the threshold is not in (0, 1], or a set is empty.
    """
    check(sets, threshold)
    pairs = []
    for rows, columns, similarity in _blocks(sets, sets):
        keep = (rows < columns) & (similarity >= threshold)
        found = zip(rows[keep], columns[keep], similarity[keep], strict=True)
        pairs += [Pair(int(i), int(j), float(s)) for i, j, s in found]
    return sorted(pairs)


def nearest(
    left: Sequence[Collection[str]], right: Sequence[Collection[str]]
) -> list[tuple[int, float] | None]:
    """For each set of `left` the most similar one of `right` as (position, similarity), the first
    of equals.

    None where no set of `right` shares a member.
    """
    best: list[tuple[int, float] | None] = [None] * len(left)
    for rows, columns, similarity in _blocks(left, right):
        order = np.lexsort((columns, -similarity, rows))
        firsts = order[np.unique(rows[order], return_index=True)[1]]
        for k in firsts:
            best[int(rows[k])] = (int(columns[k]), float(similarity[k]))
    return best


def check(sets: Sequence[Collection[str]], threshold: float) -> None:
    """Refuse what has no meaning here: a threshold outside (0, 1], an empty set."""
    if not 0.0 < threshold <= 1.0:
        raise ValueError(f"expected a threshold in (0, 1], got {threshold}")
    empty = [i for i, members in enumerate(sets) if not members]
    if empty:
        raise ValueError(f"expected sets with members, got empty ones at positions {empty[:5]}")


def _blocks(
    left: Sequence[Collection[str]], right: Sequence[Collection[str]]
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(rows, columns, similarities) of all pairs that share a member, some rows of `left` at a
    time.
    """
    if not left or not right:
        return
    vocabulary: dict[str, int] = {}
    for members in (*left, *right):
        for member in members:
            vocabulary.setdefault(member, len(vocabulary))
    first, second = _membership(left, vocabulary), _membership(right, vocabulary)
    first_sizes, second_sizes = np.diff(first.indptr), np.diff(second.indptr)
    transposed = second.T.tocsr()
    for start in range(0, len(left), ROWS_PER_BLOCK):
        shared = (first[start : start + ROWS_PER_BLOCK] @ transposed).tocoo()
        rows = shared.row.astype(np.int64) + start
        columns = shared.col.astype(np.int64)
        union = first_sizes[rows] + second_sizes[columns] - shared.data
        yield rows, columns, shared.data / union


def _membership(sets: Sequence[Collection[str]], vocabulary: dict[str, int]) -> sparse.csr_matrix:
    indices = [sorted({vocabulary[member] for member in members}) for members in sets]
    pointers = np.cumsum([0, *map(len, indices)])
    flat = np.fromiter((i for row in indices for i in row), dtype=np.int64, count=int(pointers[-1]))
    ones = np.ones(len(flat), dtype=np.int64)
    return sparse.csr_matrix((ones, flat, pointers), shape=(len(sets), len(vocabulary)))
