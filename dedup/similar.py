"""All similar pairs of a list of sets, by whichever of the two joins suits its length."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dedup.join import Pair, exact_pairs
from dedup.minhash import minhash_pairs

THRESHOLD = 0.8
"""Jaccard similarity from which two operator signatures count as the same problem."""
SWITCH_AT = 100_000
"""Distinct sets from which MinHash proposes the pairs; below, the exact join is both faster and
complete.
"""


def similar_pairs(
    sets: Sequence[Collection[str]], threshold: float = THRESHOLD, switch_at: int = SWITCH_AT
) -> list[Pair]:
    """Pairs with Jaccard similarity >= threshold, with their exact similarity, ordered by position.

    Fewer than `switch_at` sets: the exact sparse join, complete. From there on: MinHash with
    banding proposes and every proposal is verified exactly, so a pair may be missed
    (`minhash.probability_found`) but none is wrong.
    """
    join = minhash_pairs if len(sets) >= switch_at else exact_pairs
    return join(sets, threshold)
