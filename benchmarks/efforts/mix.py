"""The mixed solutions on which the two efforts are compared, in an order that stays mixed.

    composed  an expert's solutions of composed problems, mutants and tricks made of them
    tests     the exploits of tests/exploits, their twins, the honest solutions of their problems
    twelve    the twelve solutions of the comparison of verifiers (verifier_cases)

The list follows from seed and target alone. Solutions of a problem stand together in groups of
eight or fewer, because a judge is opened for a problem; groups of all sources alternate. What an
entry is follows from its place; whether its edit fits is found out when its turn comes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks import verifier_cases
from benchmarks.efforts.composed import ComposedGroup
from benchmarks.efforts.entries import EXPLOIT, FAST, WRONG, Entry, Group, Verify, marked
from schemas.records import Problem, Solution, Target
from tests.exploits.problems import CASES
from tests.exploits.registry import EXPLOITS
from verification.machine import Machine

GROUP = 8
PATTERN = ("composed", "kept", "composed", "kept", "composed")
"""Of groups: a fifth of the composed problems is refused, and of the others some edits do not
fit, so that the fixed ones last for about 500 solutions."""


@dataclass(frozen=True, kw_only=True)
class KeptGroup:
    """Solutions that are there already."""

    key: str
    entries: tuple[Entry, ...]
    problem: Callable[[], Problem]
    insists: bool = True

    def open(self, machine: Machine) -> Problem:
        return self.problem()

    def solution(self, entry: Entry, verify: Verify) -> Solution:
        if entry.make is None:
            raise ValueError(f"{entry.id}: nothing to make it of")
        return marked(entry.make(), entry.id)

    def describe(self, entry: Entry) -> dict[str, Any]:
        return {"what": entry.id.removeprefix(f"{self.key}/")}


def groups(target: Target, seed: int) -> Iterator[Group]:
    """All groups, without end: composed ones go on when the others are used up."""
    kept = itertools.chain(kept_groups(target))
    indices = itertools.count()
    for source in itertools.cycle(PATTERN):
        if source == "composed":
            yield ComposedGroup.of(target, seed, next(indices))
        else:
            yield from itertools.islice(kept, 1)


def first_entries(target: Target, seed: int, num: int) -> list[Entry]:
    """The first so many entries of the list."""
    every = itertools.chain.from_iterable(group.entries for group in groups(target, seed))
    return list(itertools.islice(every, num))


def kept_groups(target: Target) -> list[KeptGroup]:
    """The solutions that are there already, in groups: of every problem one, then again."""
    by_problem = [*_of_tests(target), *_of_twelve(target)]
    rounds = itertools.zip_longest(*by_problem)
    return [group for round_ in rounds for group in round_ if group is not None]


def _of_tests(target: Target) -> Iterator[list[KeptGroup]]:
    for key, case in CASES.items():
        where = f"tests/{key}"
        entries = [_entry(f"{where}/honest", FAST, case.solution, target)]
        for one in EXPLOITS:
            if one.problem == key and target in one.targets:
                entries.append(_entry(f"{where}/{one.id}", EXPLOIT, one.solution, target))
                if one.twin is not None:
                    twin = one.twin_solution
                    entries.append(_entry(f"{where}/{one.id} twin", FAST, twin, target))
        yield _cut(where, entries, partial(case.problem, target))


def _of_twelve(target: Target) -> Iterator[list[KeptGroup]]:
    kinds = {
        verifier_cases.HONEST: FAST, verifier_cases.WRONG: WRONG, verifier_cases.EXPLOIT: EXPLOIT,
    }  # fmt: skip
    for key, subject in verifier_cases.SUBJECTS.items():
        where = f"twelve/{key}"
        entries = [
            _entry(f"{where}/{case.name}", kinds[case.kind], case.solution, subject, target)
            for case in verifier_cases.CASES
        ]
        # Honest ones stand first and last there.
        mixed = [entries[index * 5 % len(entries)] for index in range(len(entries))]
        yield _cut(where, mixed, partial(subject.problem, target))


def _entry(id_: str, kind: str, make: Callable[..., Solution], *given: object) -> Entry:
    return Entry(id=id_, kind=kind, make=partial(make, *given))


def _cut(key: str, entries: list[Entry], problem: Callable[[], Problem]) -> list[KeptGroup]:
    return [
        KeptGroup(key=key, entries=tuple(entries[start : start + GROUP]), problem=problem)
        for start in range(0, len(entries), GROUP)
    ]
