"""Dedup within a run and the split: order, accounting, and no signature on both sides."""

import itertools
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from dedup.deduplicate import cluster_ids, deduplicate, split_of
from dedup.rows import Matched, Row
from dedup.signature import jaccard, ngrams_of
from schemas.codec import content_id, to_json

OPERATORS = ("relu", "tanh", "exp", "matmul", "softmax", "mean", "conv2d", "sigmoid")


def row(index: int, operators: tuple[str, ...], attributes: str = "", code: str = "") -> Row:
    return Row(
        problem_id=content_id(code or f"code {index}"),
        index=index,
        operators=operators,
        ngrams=ngrams_of(operators),
        ngrams_attributes=ngrams_of([f"{name}({attributes})" for name in operators]),
    )


def matched(rows: list[Row]) -> list[Matched]:
    return [
        Matched(row=r, kernelbench_id=None, kernelbench_similarity=0.0, near_miss=False)
        for r in rows
    ]


def composed(count: int) -> list[Row]:
    """Random problems of one to four operators, in three attribute classes and two sizes."""
    generator = random.Random(17)
    rows = []
    for index in range(count):
        operators = tuple(generator.choices(OPERATORS, k=generator.randint(1, 4)))
        attributes = generator.choice(["rank=2", "rank=3", "dtype=bfloat16,rank=2"])
        code = f"{operators} {attributes} at size {generator.randrange(2)}"
        rows.append(row(index, operators, attributes, code))
    return rows


def test_exact_copies_keep_the_first_index() -> None:
    rows = [row(i, ("relu", "tanh"), code="same") for i in (5, 2, 9)]
    kept, rejected = deduplicate(matched(rows))
    assert [neighbour.problem_id for neighbour in kept] == [content_id("same")]
    assert [(r.index, r.reason, r.detail) for r in rejected] == [
        (5, "exact_copy", "same code as index 2"),
        (9, "exact_copy", "same code as index 2"),
    ]


def test_equal_attributes_are_duplicates_and_other_attributes_are_not() -> None:
    sizes_only = [row(0, ("matmul", "relu"), "rank=2"), row(1, ("matmul", "relu"), "rank=2")]
    variant = row(2, ("matmul", "relu"), "rank=3")
    kept, rejected = deduplicate(matched([*sizes_only, variant]))
    keeper = min(r.problem_id for r in sizes_only)
    assert {n.problem_id for n in kept} == {keeper, variant.problem_id}
    assert [(r.reason, r.detail) for r in rejected] == [
        ("duplicate", f"of {keeper}, similarity 1.000")
    ]
    assert len({n.cluster_id for n in kept}) == 1  # the variant stays on the same side


def test_distinct_sequences_are_not_decimated() -> None:
    """All 64 two-operator and all 512 three-operator sequences stay."""
    sequences = [s for k in (2, 3) for s in itertools.product(OPERATORS, repeat=k)]
    kept, rejected = deduplicate(matched([row(i, s) for i, s in enumerate(sequences)]))
    assert (len(kept), rejected) == (576, [])


def test_a_long_chain_with_one_other_end_is_a_duplicate() -> None:
    trunk = ("conv2d", "relu") * 10
    kept, (rejected,) = deduplicate(matched([row(0, (*trunk, "exp")), row(1, (*trunk, "tanh"))]))
    assert len(kept) == 1 and rejected.reason == "duplicate"
    similarity = float(rejected.detail.split()[-1])
    assert 0.8 <= similarity < 1.0


def test_every_row_is_kept_or_rejected_whatever_the_order() -> None:
    rows = composed(300)
    expected = deduplicate(matched(rows))
    kept, rejected = expected
    assert len(kept) + len(rejected) == 300
    assert {r.reason for r in rejected} == {"exact_copy", "duplicate"}
    for seed in range(3):
        shuffled = random.Random(seed).sample(rows, 300)
        assert deduplicate(matched(shuffled)) == expected


def test_no_signature_and_no_near_duplicate_on_both_sides() -> None:
    rows = composed(600)
    kept, _ = deduplicate(matched(rows))
    by_id = {r.problem_id: r for r in rows}
    sides: dict[str, list[tuple[str, ...]]] = {"train": [], "validation": []}
    for neighbour in kept:
        assert neighbour.split == split_of(neighbour.cluster_id)
        sides[neighbour.split].append(by_id[neighbour.problem_id].ngrams)
    assert sides["validation"]
    for left, right in itertools.product(sides["train"], sides["validation"]):
        assert jaccard(left, right) < 0.8


def test_a_no_op_does_not_carry_a_signature_across_the_split() -> None:
    plain = row(0, ("matmul", "relu"))
    padded = Row(
        problem_id=content_id("padded"),
        index=1,
        operators=("matmul", "relu"),
        ngrams=ngrams_of(["matmul", "mul", "relu"]),
        ngrams_attributes=("matmul(padded)",),
    )
    assert len(set(cluster_ids([plain, padded]))) == 1
    assert len(set(cluster_ids([plain, row(2, ("matmul", "tanh"))]))) == 2


def test_a_cluster_has_the_same_id_in_every_run() -> None:
    alone = cluster_ids([row(0, ("matmul", "relu"))])
    assert cluster_ids([row(7, ("exp", "tanh")), row(3, ("matmul", "relu"))])[1:] == alone


def test_about_one_cluster_in_twenty_validates() -> None:
    sides = [split_of(content_id(str(i))) for i in range(4000)]
    assert sides.count("validation") == pytest.approx(200, abs=60)
    assert set(sides) == {"train", "validation"}


def test_empty_input() -> None:
    assert deduplicate([]) == ([], [])


def test_the_result_does_not_depend_on_the_hash_seed() -> None:
    program = (
        "import sys; from tests.test_dedup_deduplicate import digest; sys.stdout.write(digest())"
    )
    root = Path(__file__).resolve().parent.parent
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=root,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert digests == {digest()}


def digest() -> str:
    """One hash over everything that dedup decides about 200 problems, through MinHash as well."""
    from dedup.minhash import minhash_pairs

    rows = composed(200)
    pairs = minhash_pairs([r.ngrams for r in rows], 0.6)
    return content_id(repr((to_json(deduplicate(matched(rows))), pairs)))
