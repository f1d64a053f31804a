"""The joins against a double loop, and the groups made from pairs."""

import random

import pytest

from dedup.clusters import components, leaders
from dedup.join import Pair, exact_pairs, nearest
from dedup.minhash import BANDS, ROWS, minhash_pairs, probability_found
from dedup.similar import similar_pairs


def random_sets(count: int, seed: int) -> list[set[str]]:
    """Small sets, a third of them near copies of earlier ones."""
    generator = random.Random(seed)
    sets: list[set[str]] = []
    for i in range(count):
        if i and i % 3 == 0:
            copy = set(generator.choice(sets))
            copy.discard(min(copy))
            sets.append(copy | {f"op{generator.randrange(60)}"})
        else:
            size = generator.randint(4, 20)
            sets.append({f"op{generator.randrange(60)}" for _ in range(size)})
    return sets


def double_loop(sets: list[set[str]], threshold: float) -> list[tuple[int, int]]:
    return [
        (i, j)
        for i in range(len(sets))
        for j in range(i + 1, len(sets))
        if len(sets[i] & sets[j]) >= threshold * len(sets[i] | sets[j])
    ]


@pytest.mark.parametrize("threshold", [0.5, 0.8, 1.0])
def test_exact_join_equals_a_double_loop(threshold: float) -> None:
    sets = random_sets(120, seed=3) + random_sets(40, seed=3)  # the second lot are exact copies
    pairs = exact_pairs(sets, threshold)
    assert [(pair.left, pair.right) for pair in pairs] == double_loop(sets, threshold)
    assert len(pairs) >= 40
    for left, right, similarity in pairs:
        assert similarity == len(sets[left] & sets[right]) / len(sets[left] | sets[right])


def test_the_threshold_itself_counts() -> None:
    four_of_five = [set("abcd"), set("abcde")]
    assert exact_pairs(four_of_five, 0.8) == [Pair(0, 1, 0.8)]


def test_blocks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = random_sets(50, seed=5)
    whole = exact_pairs(sets, 0.5)
    monkeypatch.setattr("dedup.join.ROWS_PER_BLOCK", 7)
    assert exact_pairs(sets, 0.5) == whole != []


def test_minhash_agrees_with_the_exact_join_on_500_sets() -> None:
    sets = random_sets(500, seed=7)
    exact = similar_pairs(sets, 0.8)
    assert len(exact) > 50
    assert minhash_pairs(sets, 0.8) == exact
    assert similar_pairs(sets, 0.8, switch_at=500) == exact


def test_the_switch_is_by_number_of_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dedup.similar.exact_pairs", lambda sets, threshold: "exact")
    monkeypatch.setattr("dedup.similar.minhash_pairs", lambda sets, threshold: "minhash")
    sets = [{"a"}, {"b"}, {"c"}]
    assert [similar_pairs(sets, 0.8, switch_at=at) for at in (3, 4)] == ["minhash", "exact"]


def test_band_parameters_use_all_permutations_and_find_the_threshold() -> None:
    assert BANDS * ROWS == 128
    assert probability_found(0.8) > 0.9999
    assert probability_found(0.5) == pytest.approx(0.873, abs=1e-3)


@pytest.mark.parametrize("join", [exact_pairs, minhash_pairs])
def test_empty_sets_and_bad_thresholds_are_refused(join) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=r"positions \[1\]"):
        join([{"a"}, set()], 0.8)
    with pytest.raises(ValueError, match="got 0"):
        join([{"a"}], 0)
    assert join([], 0.8) == []


def test_nearest_takes_the_first_of_equals_and_none_without_overlap() -> None:
    right = [set("abx"), set("ab"), set("ab")]
    assert nearest([set("ab"), set("z")], right) == [(1, 1.0), None]
    assert nearest([], right) == [] and nearest([set("ab")], []) == [None]


CHAIN = [Pair(i, i + 1, 0.84) for i in range(11)]


def test_a_chain_is_one_component_but_six_leaders() -> None:
    assert components(12, CHAIN) == [0] * 12
    kept = leaders(list(range(12)), CHAIN)
    assert len({keeper for keeper, _ in kept}) == 6
    direct = {(pair.left, pair.right) for pair in CHAIN}
    for item, (keeper, _) in enumerate(kept):
        assert item == keeper or (min(item, keeper), max(item, keeper)) in direct


def test_leaders_prefer_the_more_similar_keeper() -> None:
    pairs = [Pair(0, 2, 0.8), Pair(1, 2, 0.9)]
    assert leaders(["a", "b", "c"], pairs) == [(0, 1.0), (1, 1.0), (1, 0.9)]


def test_leaders_do_not_depend_on_order() -> None:
    generator = random.Random(11)
    sets = random_sets(60, seed=13)
    ranks = [f"{i:02d}" for i in range(60)]
    expected = {
        ranks[i]: ranks[k] for i, (k, _) in enumerate(leaders(ranks, exact_pairs(sets, 0.6)))
    }
    assert len(set(expected.values())) < 60
    for _ in range(3):
        order = generator.sample(range(60), 60)
        shuffled = [ranks[i] for i in order]
        pairs = exact_pairs([sets[i] for i in order], 0.6)
        found = leaders(shuffled, pairs)
        assert {shuffled[i]: shuffled[k] for i, (k, _) in enumerate(found)} == expected


def test_equal_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="distinct"):
        leaders(["a", "a"], [])
