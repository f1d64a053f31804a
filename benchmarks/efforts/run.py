"""Both verdicts on every entry, by several processes that share a device and a warm parent.

Each process takes a group, opens a judge for its problem and asks it twice about each solution, at
`reward` and at `publish` in an order drawn by lot. What was found goes to the caller at once.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import queue
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.efforts.entries import Entry, Group, Skip
from benchmarks.efforts.mix import groups
from benchmarks.efforts.rows import EFFORTS, side
from benchmarks.verifier_ours import TimedMachine
from runtime.sandbox import ParentGone
from schemas.codec import to_json
from schemas.records import Solution, Verdict
from verification.check import ProblemRefused, doubt, open_judge
from verification.judge import Judge
from verification.machine import MachineSettings, start_zygote
from verification.policy import Policy

Message = tuple[str, dict[str, Any]]
"""("pair" | "skipped" | "error", a row)"""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run does. Sent to every process."""

    settings: MachineSettings
    seed: int
    num: int
    """Pairs in all, with those of earlier runs."""
    done: frozenset[str]
    """Ids that are not asked about: pairs of earlier runs, and what was skipped there."""
    pairs: int
    """How many pairs there are from earlier runs."""
    ends: float
    """No further solution is begun after this time of day."""
    partial_isolation: bool = False


def run(plan: Plan, workers: int) -> Iterator[Message]:
    """What the processes find, as they find it. Raises what one of them raised, at the end."""
    cache = Path(plan.settings.cache)
    cache.mkdir(parents=True, exist_ok=True)
    zygote = start_zygote(cache, plan.settings.target)
    try:
        shared = replace(plan, settings=replace(plan.settings, zygote=zygote.address))
        context = multiprocessing.get_context("spawn")
        told = (context.Queue(), context.Value("i", 0), context.Value("i", plan.pairs))
        with ProcessPoolExecutor(workers, context, _share, told) as pool:
            jobs = [pool.submit(_drive, shared) for _ in range(workers)]
            while not all(job.done() for job in jobs):
                with contextlib.suppress(queue.Empty):
                    yield told[0].get(timeout=0.5)
            with contextlib.suppress(queue.Empty):
                while True:
                    yield told[0].get(timeout=0.5)
            for job in jobs:
                job.result()
    finally:
        zygote.close()


_shared: tuple[Any, Any, Any] | None = None


def _share(*shared: Any) -> None:
    global _shared
    _shared = shared


def _drive(plan: Plan) -> None:
    """One of the processes: groups until there are pairs enough, or time is over."""
    if _shared is None:
        raise RuntimeError("this process was not told what it shares")
    found, following, claimed = _shared
    every, taken = groups(plan.settings.target, plan.seed), 0
    with contextlib.closing(TimedMachine(plan.settings)) as machine:
        while time.time() < plan.ends and claimed.value < plan.num:
            number = _add(following, 1)
            group = next(itertools.islice(every, number - taken, None))
            taken = number + 1
            with contextlib.closing(Session(plan, machine, group, claimed)) as session:
                for message in session.messages():
                    found.put(message)


def _add(counter: Any, change: int) -> int:
    """The value before."""
    with counter.get_lock():
        counter.value += change
        return int(counter.value) - change


class Session:
    """A group with its judge."""

    def __init__(self, plan: Plan, machine: TimedMachine, group: Group, claimed: Any) -> None:
        self._plan, self._machine, self._group = plan, machine, group
        self._claimed = claimed
        self._judge: Judge | None = None

    def close(self) -> None:
        if self._judge is not None:
            self._judge.close()
            self._judge = None

    def messages(self) -> Iterator[Message]:
        """A row for every entry that is not done yet."""
        for entry in self._group.entries:
            if entry.id in self._plan.done:
                continue
            if time.time() >= self._plan.ends:
                return
            if _add(self._claimed, 1) >= self._plan.num:
                _add(self._claimed, -1)
                return
            kind, row = self._attempt(entry)
            if kind != "pair":
                _add(self._claimed, -1)
            yield kind, {"id": entry.id, "kind": entry.kind, **row}

    def _attempt(self, entry: Entry) -> Message:
        try:
            try:
                return "pair", self._pair(entry)
            except ParentGone:  # a solution may have killed it; its place is taken by a new one
                self.close()
                return "pair", self._pair(entry)
        except Skip as skip:
            return "skipped", {"reason": str(skip)}
        except Exception as error:  # of ours, and no verdict
            self.close()
            return "error", {"reason": f"{type(error).__name__}: {error}"[:500]}

    def _pair(self, entry: Entry) -> dict[str, Any]:
        """Both verdicts. Raises Skip."""
        judge = self._open()
        solution = self._group.solution(entry, lambda made: judge.verify(made, EFFORTS[0]))
        order = Random(f"{self._plan.seed}/{entry.id}").sample(EFFORTS, len(EFFORTS))
        verdicts, sides = {}, {}
        for effort in order:
            verdicts[effort], cost = self._ask(judge, solution, effort)
            sides[effort] = side(verdicts[effort]) | cost
        row = {**self._group.describe(entry), "first": order[0]}
        row |= {effort: sides[effort] for effort in EFFORTS}
        if sides["reward"]["tier"] != sides["publish"]["tier"]:  # all there is to know of it
            row["verdicts"] = to_json(verdicts)
            row["files"] = {source.path: source.text for source in solution.files}
        return row

    def _ask(self, judge: Judge, made: Solution, effort: str) -> tuple[Verdict, dict[str, float]]:
        self._machine.built_s = 0.0
        started = time.perf_counter()
        verdict = judge.verify(made, effort)
        seconds = time.perf_counter() - started
        # The second effort finds the libraries of the first one in the cache.
        cost = {"seconds": round(seconds, 3), "build_s": round(self._machine.built_s, 3)}
        return verdict, cost

    def _open(self) -> Judge:
        """The judge, opened when the first entry asks for it. Raises Skip."""
        if self._judge is None:
            problem = self._group.open(self._machine)
            policy = Policy(partial_isolation=self._plan.partial_isolation)
            insists = self._group.insists
            try:
                self._judge, admission = open_judge(problem, self._machine, insists, policy)
            except ProblemRefused as refusal:
                raise Skip(str(refusal)[:300]) from refusal
            if admission.reason is not None and not insists:
                self.close()
                raise Skip(f"the problem is not admitted: {doubt(admission)}"[:300])
        return self._judge
