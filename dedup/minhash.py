"""Candidates for large sets of problems by MinHash and banding, every one of them verified exactly.

Banding finds a pair of Jaccard similarity s with probability 1 - (1 - s^ROWS)^BANDS. With 32
bands of 4 rows that is above 0.9999 at 0.8, so the parameters are chosen for recall; what the
bands let through wrongly, the exact check removes. The library's `threshold` argument is not
used: it is a guess at parameters, not a guarantee.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from datasketch import MinHash, MinHashLSH

from dedup.join import Pair, check
from dedup.signature import jaccard

PERMUTATIONS = 128
BANDS, ROWS = 32, 4
SEED = 1

if BANDS * ROWS != PERMUTATIONS:
    raise ValueError(f"{BANDS} bands x {ROWS} rows must use all {PERMUTATIONS} permutations")


def minhash_pairs(sets: Sequence[Collection[str]], threshold: float) -> list[Pair]:
    """Pairs of `sets` with exact Jaccard similarity >= threshold, among those the bands propose.

    Raises:
        ValueError: the threshold is not in (0, 1], or a set is empty (two empty sketches would be
            equal).
    """
    check(sets, threshold)
    pairs = []
    for left, right in candidates(sets):
        similarity = jaccard(sets[left], sets[right])
        if similarity >= threshold:
            pairs.append(Pair(left, right, similarity))
    return sorted(pairs)


def candidates(sets: Sequence[Collection[str]]) -> Iterator[tuple[int, int]]:
    """(left, right) positions, left < right, of sets that share a band; each pair once."""
    index = MinHashLSH(num_perm=PERMUTATIONS, params=(BANDS, ROWS))
    encoded = ([member.encode() for member in sorted(members)] for members in sets)
    sketches = MinHash.generator(encoded, num_perm=PERMUTATIONS, seed=SEED)
    for right, sketch in enumerate(sketches):
        for left in sorted(index.query(sketch)):  # the library returns them in set order
            yield left, right
        index.insert(right, sketch)


def probability_found(similarity: float) -> float:
    """The probability that two sets of this Jaccard similarity share a band."""
    return 1.0 - (1.0 - similarity**ROWS) ** BANDS
