"""What a problem computes, as a set: 1- to 3-grams of its operator sequence.

Two problems with the same n-grams compute the same thing, whatever their text, names, shapes and
API spelling. An n-gram is one readable string, `matmul>add>relu#2`: the operators joined by `>`,
`^` before the first and `$` after the last, `#k` for the k-th occurrence of a repeated n-gram.
With that index a multiset is an ordinary set of strings that a Parquet list holds, and multiset
Jaccard is ordinary Jaccard.

What it does not compare: which earlier result an operator takes. Two graphs with one sequence of
operators but other wires (a residual from the input or from the middle) have one signature.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from runtime.trace import OperatorNode

NGRAM_SIZES = (1, 2, 3)
START, END = "^", "$"


@dataclass(frozen=True, kw_only=True)
class Signature:
    """The forms of one problem that are compared.

    `operators` are canonical names in the order of execution, without constant no-ops (x * 1, x +
    0). `ngrams` are names only, no-ops included: `ngrams_of(operators)` is the same set without
    them, and the similarity of two problems is the larger of the two. `ngrams_attributes` carry
    bucketed attributes.
    """

    operators: tuple[str, ...]
    ngrams: tuple[str, ...]
    ngrams_attributes: tuple[str, ...]


def signature(nodes: Sequence[OperatorNode]) -> Signature:
    """The signature of a traced problem.

    Raises:
        ValueError: the graph has no operator, so there is nothing to compare.
    """
    if not nodes:
        raise ValueError(
            "expected at least one operator, got a graph without any: nothing to compare"
        )
    return Signature(
        operators=tuple(node.operator for node in nodes if not node.neutral),
        ngrams=ngrams_of([node.operator for node in nodes]),
        ngrams_attributes=ngrams_of([_with_attributes(node) for node in nodes]),
    )


def ngrams_of(tokens: Sequence[str]) -> tuple[str, ...]:
    """Sorted 1- to 3-grams of a sequence, as strings; sequence ends take part from 2-grams on."""
    padded = [START, *tokens, END]
    grams = list(tokens)
    for size in NGRAM_SIZES[1:]:
        grams += [">".join(padded[i : i + size]) for i in range(len(padded) - size + 1)]
    return tuple(sorted(_numbered(grams)))


def jaccard(left: Iterable[str], right: Iterable[str]) -> float:
    """|left & right| / |left | right|; two empty sets share nothing (0.0)."""
    left, right = set(left), set(right)
    union = len(left | right)
    return len(left & right) / union if union else 0.0


def operator_key(ngrams: Iterable[str]) -> str:
    """One string per operator signature, equal exactly when the n-grams are."""
    return " ".join(sorted(ngrams))


def _numbered(grams: Iterable[str]) -> Iterable[str]:
    seen: Counter[str] = Counter()
    for gram in grams:
        seen[gram] += 1
        yield gram if seen[gram] == 1 else f"{gram}#{seen[gram]}"


def _with_attributes(node: OperatorNode) -> str:
    """`softmax(dim=-1,rank=4)`; outputs other than the first are named, or LSTM states would look
    alike.
    """
    attributes = [f"{name}={value}" for name, value in node.attributes]
    if node.used != (0,):
        attributes.append("out=" + "+".join(map(str, node.used)))
    return f"{node.operator}({','.join(attributes)})"
