"""Dedup within a run, and the train / validation split.

What counts as the same problem:

    exact copies      the same code: one is kept
    duplicates        Jaccard >= 0.8 of the n-grams with attributes, that is the same operators in
                      the same order with the same dimensions, ranks, strides, groups, broadcasts
                      and dtypes: one is kept. Problems that differ only in sizes or in constants
                      are duplicates, on purpose: they ask for the same kernel.
    real variants     kept: other dimensions or rank, depthwise, grouped or pointwise convolutions,
                      a skinny matmul (one size 16 times below the largest), a row instead of a
                      full operand, bfloat16
    other operators   kept: in a graph of up to five operators one changed or swapped operator
                      moves the similarity to about 0.5, far below the threshold

A class that is not in the graph (tf32 against fp32, the same text otherwise) does not make two
problems different.

The split is decided per cluster, names only: all problems with one operator signature, and all
signatures joined by similarities >= 0.8, stand on one side. A variant that dedup keeps never
faces its sibling across the split.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence

from dedup.clusters import components, leaders
from dedup.rows import Matched, Row
from dedup.signature import operator_key
from dedup.similar import THRESHOLD, similar_pairs
from schemas.codec import content_id
from schemas.records import Neighbour, Rejection, RejectStage

VALIDATION_SHARE = 0.05


def deduplicate(matched: Sequence[Matched]) -> tuple[list[Neighbour], list[Rejection]]:
    """Keep one of every group of same problems; say where each kept one stands.

    Returns:
        One Neighbour per kept problem and one Rejection per dropped row, both ordered by content
        rank and then index; together as many as came in.
    """
    ordered = sorted(matched, key=lambda match: match.row.rank)
    first: dict[str, Matched] = {}
    rejected: list[Rejection] = []
    for match in ordered:
        row = match.row
        original = first.setdefault(row.problem_id, match)
        if original is not match:
            detail = f"same code as index {original.row.index}"
            rejected.append(row.rejection(RejectStage.DEDUP, "exact_copy", detail))
    unique = list(first.values())
    keepers = _keepers([match.row for match in unique])
    kept = []
    for match, (keeper, similarity) in zip(unique, keepers, strict=True):
        if keeper is match.row:
            kept.append(match)
        else:
            detail = f"of {keeper.problem_id}, similarity {similarity:.3f}"
            rejected.append(match.row.rejection(RejectStage.DEDUP, "duplicate", detail))
    clusters = cluster_ids([match.row for match in kept])
    neighbours = [
        Neighbour(
            problem_id=match.row.problem_id,
            cluster_id=cluster,
            kernelbench_id=match.kernelbench_id,
            kernelbench_similarity=match.kernelbench_similarity,
            near_miss=match.near_miss,
            split=split_of(cluster),
        )
        for match, cluster in zip(kept, clusters, strict=True)
    ]
    return neighbours, sorted(rejected, key=lambda r: (r.problem_id, r.index))


def _keepers(rows: Sequence[Row]) -> list[tuple[Row, float]]:
    """The row that stands for each row, and their similarity. Equal signatures meet before the
    join.
    """
    by_signature: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_signature[operator_key(row.ngrams_attributes)].append(row)
    best = [min(group, key=lambda row: row.rank) for group in by_signature.values()]
    pairs = similar_pairs([row.ngrams_attributes for row in best])
    assigned = leaders([row.rank for row in best], pairs)
    keeper_of = {
        signature: (best[keeper], similarity)
        for signature, (keeper, similarity) in zip(by_signature, assigned, strict=True)
    }
    return [keeper_of[operator_key(row.ngrams_attributes)] for row in rows]


def cluster_ids(rows: Sequence[Row]) -> list[str]:
    """The id of each row's cluster: the smallest hash of an operator signature in it.

    A signature without near-duplicates has the same cluster id, and so the same split, in every
    run.
    """
    signatures = {operator_key(row.ngrams): row for row in rows}
    distinct = list(signatures.values())
    pairs = similar_pairs([row.ngrams for row in distinct], THRESHOLD)
    if any(row.ngrams_effective != row.ngrams for row in distinct):  # some hold constant no-ops
        pairs += similar_pairs([row.ngrams_effective for row in distinct], THRESHOLD)
    roots = components(len(distinct), pairs)
    members: dict[int, list[str]] = defaultdict(list)
    for key, root in zip(signatures, roots, strict=True):
        members[root].append(content_id(key))
    cluster_of = {key: min(members[root]) for key, root in zip(signatures, roots, strict=True)}
    return [cluster_of[operator_key(row.ngrams)] for row in rows]


def split_of(cluster_id: str) -> str:
    """train or validation, by the hash of the cluster; VALIDATION_SHARE of clusters validate."""
    digest = hashlib.sha256(f"split:{cluster_id}".encode()).digest()
    share = int.from_bytes(digest[:8], "big") / 2**64
    return "validation" if share < VALIDATION_SHARE else "train"
