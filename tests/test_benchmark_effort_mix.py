"""The list of mixed solutions, how it is worked off, and the arithmetic of the table."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.efforts.entries import EXPLOIT, FAST, SLOW, WRONG, Entry, Skip, marked
from benchmarks.efforts.mix import first_entries, groups, kept_groups
from benchmarks.efforts.rows import figures, side, table, wilson
from benchmarks.efforts.run import Message, Plan, Session
from schemas.records import Solution, Target
from tests import factories
from tests.exploits.registry import EXPLOITS


@pytest.mark.parametrize("target", Target)
def test_the_list_is_mixed_as_declared(target: Target) -> None:
    entries = first_entries(target, 0, 500)
    assert len({entry.id for entry in entries}) == 500
    for num, slack in ((500, 0.04), (100, 0.06)):
        counts = Counter(entry.kind for entry in entries[:num])
        for kind, share in {FAST: 1 / 3, SLOW: 1 / 6, WRONG: 1 / 4, EXPLOIT: 1 / 4}.items():
            assert abs(counts[kind] / num - share) < slack, (kind, counts)
    assert {entry.id.split("/")[0] for entry in entries[:300]} == {"composed", "tests", "twelve"}


def test_the_list_is_the_same_every_time_and_longer_ones_go_on() -> None:
    entries = first_entries(Target.CUDA, 3, 300)
    assert entries == first_entries(Target.CUDA, 3, 300)
    assert entries[:100] == first_entries(Target.CUDA, 3, 100)
    assert entries != first_entries(Target.CUDA, 4, 300)


@pytest.mark.parametrize("target", Target)
def test_everything_that_is_there_comes_once_and_is_another_text(target: Target) -> None:
    kept = [(group, entry) for group in kept_groups(target) for entry in group.entries]
    mine = [e for e in EXPLOITS if target in e.targets]
    twins = sum(e.twin is not None for e in mine)
    assert Counter(entry.kind for _, entry in kept) == {
        EXPLOIT: len(mine) + 8, FAST: twins + 14 + 8, WRONG: 8,
    }  # fmt: skip
    made = [group.solution(entry, lambda _: factories.verdict()) for group, entry in kept]
    assert kept[0][0].describe(kept[0][1]) == {"what": "honest"}
    assert len({solution.solution_id for solution in made}) == len(kept)
    assert all(len(group.entries) <= 8 for group in kept_groups(target))


class FakeGroup:
    """Entries that cannot be made, or whose making fails."""

    key, insists = "fake", True
    entries = tuple(Entry(id=f"fake/{name}", kind=FAST) for name in ("skip", "fail", "late"))

    def open(self, machine: Any) -> Any:
        raise Skip("not here")

    def solution(self, entry: Entry, verify: Any) -> Solution:
        raise AssertionError("it was never opened")


def session_rows(num: int, done: frozenset[str] = frozenset(), ends: float = 1e18) -> list[Message]:
    plan = Plan(
        settings=factories.machine_settings(Path("nowhere")), seed=0, num=num, done=done, pairs=0,
        ends=ends,
    )  # fmt: skip
    claimed = multiprocessing.get_context("spawn").Value("i", 0)
    rows = list(Session(plan, None, FakeGroup(), claimed).messages())  # type: ignore[arg-type]
    assert claimed.value == 0
    return rows


def test_what_is_skipped_takes_nobodys_place() -> None:
    rows = session_rows(1)
    assert [kind for kind, _ in rows] == ["skipped"] * 3
    assert rows[0][1] == {"id": "fake/skip", "kind": FAST, "reason": "not here"}
    assert [row["id"] for _, row in session_rows(9, frozenset({"fake/skip"}))] == [
        "fake/fail", "fake/late",
    ]  # fmt: skip
    assert session_rows(0) == [] and session_rows(9, ends=time.time() - 1) == []


def test_a_mark_makes_another_text() -> None:
    made = marked(Solution.of({"model_new.py": "x = 1\n"}), "a/b")
    assert made.text("model_new.py") == "x = 1\n\n# a/b\n"


def test_groups_go_on_without_end() -> None:
    every = groups(Target.CPU, 0)
    keys = [next(every).key for _ in range(200)]
    assert (
        keys[-1].startswith("composed/0/") and sum(key.startswith("composed") for key in keys) > 150
    )


def half(tier: float | None = 3.0, **fields: Any) -> dict[str, Any]:
    verdict = factories.verdict(eager=2.0, compile=1.5)
    return side(verdict) | {"tier": tier, "seconds": 2.0, "build_s": 0.5} | fields


def pair(name: str, kind: str = FAST, **sides: Any) -> dict[str, Any]:
    row = {"id": name, "kind": kind, "what": "plain", "first": "reward"}
    return row | {"reward": half(), "publish": half()} | sides


ROWS = [
    *(pair(f"same/{n}") for n in range(7)),
    pair("slower", SLOW, publish=half(2.0, speedup_eager=[1.9, 2.2, 2.3])),
    pair("race", WRONG, publish=half(-1.0, status="incorrect", reason="repeats: strayed",
                                     speedup_eager=None, speedup_compile=None)),
    pair("refused", EXPLOIT, reward=half(-1.0), publish=half(-1.0)),
    pair("ours", EXPLOIT, publish=half(None, status="reference_error", reason="it died")),
]  # fmt: skip


def test_wilson() -> None:
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    with pytest.raises(ValueError, match="nothing"):
        wilson(0, 0)


def test_figures() -> None:
    found = figures(ROWS)
    assert (found["pairs"], found["decided"], found["agreed"]) == (11, 10, 8)
    assert found["interval"] == wilson(8, 10)
    assert found["by_kind"] == {FAST: (7, 7), SLOW: (0, 1), WRONG: (0, 1), EXPLOIT: (1, 1)}
    assert found["table"][3.0, 3.0] == 7 and found["table"][3.0, -1.0] == 1
    assert found["about"] == {"whether it is right": 1, "how fast it is": 1}
    eager = found["log_ratio"]["speedup_eager"]
    assert (eager["count"], eager["median"]) == (9, 0.0)
    assert eager["max"] == pytest.approx(0.0953, abs=1e-4)
    assert found["seconds"]["reward, refused"] == {
        "median": 1.5,
        "p90": 1.5,
        "max": 1.5,
        "count": 1,
    }
    assert found["seconds"]["reward, accepted"]["count"] == 10


def test_the_table_lists_every_disagreement() -> None:
    text = table(ROWS)
    assert text.startswith(
        "8 of 10 pairs agree in tier: 80.0%, 95 % interval 49.0% to 94.3%; 1 more without"
    )
    assert "1 apart about how fast it is\n" in text
    assert "refused only by publish repeats: 1\n" in text
    crossed = text[text.index("reward down") :].splitlines()
    assert crossed[0].split()[-4:] == ["-1", "2", "3", "none"]
    assert [line.split() for line in crossed[1:4]] == [
        ["-1", "1", "0", "0", "0"], ["2", "0", "0", "0", "0"], ["3", "1", "1", "7", "1"],
    ]  # fmt: skip
    listed = text[text.index("disagreements:") :]
    assert [line.split()[0] for line in listed.splitlines()[1::3]] == ["slower", "race", "ours"]
    assert "tier -1, incorrect; repeats: strayed" in listed
    assert "speedup_eager 2.2000 [1.9000, 2.3000]" in listed
    assert "disagreements" not in table(ROWS[:7])
    assert table(ROWS[-1:]) == "1 pairs, none of them decided by both efforts"
