"""Nothing of the benchmark in the training set: what equals a benchmark problem goes, what is
close is labelled.

Direct matches only, names only: shapes, strides and groups do not make a problem new here. A
problem two steps away from the benchmark is not contaminated. Composed problems of a single
operator often *are* benchmark problems (relu, softmax) and go like any other.
"""

from __future__ import annotations

from collections.abc import Sequence

from dedup.join import nearest
from dedup.kernelbench import BenchmarkProblem
from dedup.rows import Matched, Row
from dedup.signature import jaccard
from dedup.similar import THRESHOLD
from runtime.operator_names import LAYOUT
from schemas.records import Rejection, RejectStage

NEAR_MISS = 0.7
"""From this similarity on, and below THRESHOLD, a kept problem is labelled a near miss."""
MIN_SHARED = 2
"""Operators a one-operator change must leave in common to be a near miss: relu>tanh is not one of
relu.
"""

_CONTRACTIONS = {("matmul", "add"): "linear", ("sigmoid", "mul"): "silu"}


def decontaminate(
    rows: Sequence[Row], index: Sequence[BenchmarkProblem]
) -> tuple[list[Matched], list[Rejection]]:
    """Drop rows with similarity >= 0.8 to a benchmark problem; label the near misses among the
    others.

    The similarity is the larger one of the n-grams with and without constant no-ops. A near miss
    differs in one operator (added, dropped or replaced, at least MIN_SHARED left in common) or
    has a similarity in [0.7, 0.8); the benchmark problem it names is the most similar one of
    those that make it a near miss.

    Returns:
        Kept rows and rejections, in the order of `rows`; together as many as came in.
    """
    kept: list[Matched] = []
    rejected: list[Rejection] = []
    signatures = [reduced(problem.operators) for problem in index]
    matches = _nearest(rows, index)
    for row, (position, similarity) in zip(rows, matches, strict=True):
        if position is not None and similarity >= THRESHOLD:
            detail = f"{index[position].id} similarity {similarity:.3f}"
            rejected.append(row.rejection(RejectStage.DECONTAMINATE, "kernelbench", detail))
            continue
        near = similarity >= NEAR_MISS
        if not near:
            own = reduced(row.operators)
            close = [i for i, other in enumerate(signatures) if one_operator_apart(own, other)]
            if close:
                near = True
                position = max(close, key=lambda i: (jaccard(row.ngrams, index[i].ngrams), -i))
                similarity = jaccard(row.ngrams, index[position].ngrams)
        kept.append(
            Matched(
                row=row,
                kernelbench_id=None if position is None else index[position].id,
                kernelbench_similarity=similarity,
                near_miss=near,
            )
        )
    return kept, rejected


def _nearest(
    rows: Sequence[Row], index: Sequence[BenchmarkProblem]
) -> list[tuple[int | None, float]]:
    full = nearest([row.ngrams for row in rows], [problem.ngrams for problem in index])
    effective = nearest(
        [row.ngrams_effective for row in rows], [problem.ngrams_effective for problem in index]
    )
    best: list[tuple[int | None, float]] = []
    for first, second in zip(full, effective, strict=True):
        found = [match for match in (first, second) if match is not None]
        best.append(max(found, key=lambda match: match[1]) if found else (None, 0.0))
    return best


def reduced(operators: Sequence[str]) -> tuple[str, ...]:
    """Operators as a reader counts them: no layout calls, matmul add as linear, sigmoid mul as
    silu.
    """
    result: list[str] = []
    for operator in (name for name in operators if name not in LAYOUT):
        pair = (result[-1], operator) if result else None
        if pair in _CONTRACTIONS:
            result[-1] = _CONTRACTIONS[pair]
        elif result[-2:] == ["softplus", "tanh"] and operator == "mul":
            result[-2:] = ["mish"]
        else:
            result.append(operator)
    return tuple(result)


def one_operator_apart(left: Sequence[str], right: Sequence[str]) -> bool:
    """Whether one added, dropped or replaced operator leads from `left` to `right`, MIN_SHARED of
    them staying.
    """
    shorter, longer = sorted((tuple(left), tuple(right)), key=len)
    if len(longer) - len(shorter) > 1:
        return False
    start = 0
    while start < len(shorter) and shorter[start] == longer[start]:
        start += 1
    replaced = len(shorter) == len(longer)
    rest = shorter[start + 1 :] if replaced else shorter[start:]
    if rest != longer[start + 1 :]:
        return False
    shared = len(shorter) - replaced
    return shared >= MIN_SHARED and shorter != longer
