"""A composed problem with eight solutions: the expert's, mutants and a trick made of them, and one
slowed down to near the threshold of a win."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from random import Random
from typing import Any

from benchmarks.efforts.edits import MUTANTS, Edit, Files, Text, slowed
from benchmarks.efforts.entries import COMPOSED_SLOTS, Entry, Skip, Verify, marked
from benchmarks.efforts.tricks import TRICKS, torch_does_it
from kernel_agent.expert import ir
from kernel_agent.expert.grouping import optimized_plan
from kernel_agent.expert.lowering import lower
from kernel_agent.expert.plan import Plan, reference_plan
from kernel_agent.expert.solution import solution_files
from kernel_agent.expert.variants import variants
from kernel_agent.policy import Unsupported
from kernel_agent.tracing import trace
from operator_templates.compose import ComposeError, compose
from schemas.records import Problem, Solution, Target, Verdict
from verification.machine import Machine

RATIOS = (1.0, 1.10, 1.03, 1.15, 0.95, 1.075, 1.04, 1.06)
"""Speedups that a slowed solution aims at; a win begins at 1.0526."""
TORCH = "torch_does_it"


@dataclass
class ComposedGroup:
    """Problem number `index` of the set that `seed` names, and its solutions."""

    target: Target
    seed: int
    index: int
    insists: bool = False
    drafts: list[Files] = field(default_factory=list)
    """The fused plan in its variants, filled when the group is opened."""
    plain: Files = field(default_factory=dict)
    """One kernel for each operator."""

    @staticmethod
    def of(target: Target, seed: int, index: int) -> ComposedGroup:
        return ComposedGroup(target=target, seed=seed, index=index)

    @property
    def key(self) -> str:
        return f"composed/{self.seed}/{self.index}"

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(Entry(id=f"{self.key}/{slot}", kind=kind) for slot, kind in COMPOSED_SLOTS)

    @cached_property
    def problem(self) -> Problem:
        """Raises ComposeError."""
        return compose(self.seed, self.index, self.target)

    def open(self, machine: Machine) -> Problem:
        try:
            graph = lower(trace(self.problem, machine))
            plan, plain = optimized_plan(graph), reference_plan(graph)
        except (ComposeError, Unsupported, ir.Unsupported) as error:
            raise Skip(f"{type(error).__name__}: {error}"[:300]) from error
        return self.opened(plan, plain)

    def opened(self, plan: Plan, plain: Plan) -> Problem:
        """With its plans. Raises Skip where they cannot be printed."""
        problem = self.problem
        try:
            for params in variants(plan, problem.target, problem.precision):
                files = solution_files(problem.code, plan, problem.target, params)
                if files not in self.drafts:
                    self.drafts.append(files)
            self.plain = solution_files(problem.code, plain, problem.target)
        except ir.Unsupported as error:
            raise Skip(f"{type(error).__name__}: {error}"[:300]) from error
        return problem

    def solution(self, entry: Entry, verify: Verify) -> Solution:
        """Of an open group. Raises Skip."""
        slot = entry.id.rsplit("/", 1)[1]
        if slot == "slowed":
            plain = verify(self._marked(self.drafts[0], "plain"))
            return self._marked(self.slowed(plain), slot)
        return self._marked(self.files(slot), slot)

    def _marked(self, files: Files, slot: str) -> Solution:
        return marked(Solution.of(files), f"{self.key}/{slot}")

    def files(self, slot: str) -> Files:
        """The texts of any slot but "slowed". Raises Skip."""
        if slot == "plain":
            return self.drafts[0]
        if slot == "reference":
            if self.plain in self.drafts:
                raise Skip("the plain plan is the fused one")
            return self.plain
        if slot == "variant":
            if len(self.drafts) < 2:
                raise Skip("the plan has one variant")
            return self.drafts[1 + self.index % (len(self.drafts) - 1)]
        if slot == "trick":
            return self._trick()
        found = next(itertools.islice(self.mutants(), int(slot.split()[1]) - 1, None), None)
        if found is None:
            raise Skip("no further mutant fits")
        return found[1]

    def what(self, slot: str) -> str:
        """The name of the edit behind a slot. Raises Skip."""
        if slot.startswith("mutant"):
            made = self.files(slot)
            return next(name for name, files in self.mutants() if files == made)
        if slot == "trick":
            made = self._trick()
            return next((name for name, files in self._fitting(TRICKS) if files == made), TORCH)
        return slot

    def describe(self, entry: Entry) -> dict[str, Any]:
        """Raises Skip."""
        return {
            "what": self.what(entry.id.rsplit("/", 1)[1]),
            "ops": list(self.problem.ops),
            "precision": str(self.problem.precision),
        }

    def mutants(self) -> Iterator[tuple[str, Files]]:
        """Those that fit, by name, from another one on for every problem."""
        yield from self._fitting(MUTANTS)

    def _trick(self) -> Files:
        if self.index % (len(TRICKS) + 1) == len(TRICKS):
            return torch_does_it(self.problem.code, self.text)
        found = next(iter(self._fitting(TRICKS)), None)
        if found is None:
            raise Skip("no trick fits")
        return found[1]

    @property
    def text(self) -> Text:
        return Text.of(self.drafts[0], self.target)

    def _fitting(self, edits: dict[str, Edit]) -> Iterator[tuple[str, Files]]:
        names = list(edits)
        # Two steps on for every problem: three mutants of nine are taken from each.
        start = self.index * 2 % len(names)
        for name in names[start:] + names[:start]:
            made = edits[name](self.text, Random(f"{self.key}/{name}"))
            if made is not None and made != self.text.files:
                yield name, made

    def slowed(self, plain: Verdict) -> Files:
        """The plain solution with a wait that makes its speedup one of RATIOS. Raises Skip."""
        ratio = RATIOS[self.index % len(RATIOS)]
        if plain.solution is None or plain.eager is None or plain.compile is None:
            raise Skip(f"the plain solution has no times: {plain.status}: {plain.reason}"[:300])
        mine = plain.solution.median_ms
        sides = [plain.compile.median_ms, plain.eager.median_ms]
        if self.index // len(RATIOS) % 2:
            sides.reverse()
        wait_ms = next((w for side in sides if (w := side / ratio - mine) > 0), None)
        if wait_ms is None:
            raise Skip(f"the plain solution is not {ratio} times as fast as a baseline")
        return slowed(self.text, round(wait_ms * 1e6))
