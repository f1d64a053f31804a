"""Our verifier in the comparison: the judge at the effort `reward`, alone and by several processes.

Every verdict is on a solution nobody has seen: one of the cases, in turn, with a comment of its own
in every file, so that nothing comes from a store or a build cache; its build is part of it. The
problem is screened and judges are opened before the clock starts, and each process gives one
verdict that does not count.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any

import psutil

from benchmarks.verifier_cases import CASES, SUBJECTS, Case
from benchmarks.verifier_table import Decision, run_row
from runtime.lease import held_seconds
from schemas.codec import to_json
from schemas.records import Solution, Target, Verdict, VerdictStatus
from verification.building.built import Built
from verification.check import open_judge
from verification.harness import harness_hash
from verification.judge import Judge
from verification.machine import Machine, MachineSettings, start_zygote

EFFORT = "reward"
OPENING_S = 300.0
"""The longest that processes wait for each other's judges."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is asked of our verifier."""

    settings: MachineSettings
    subject: str
    names: tuple[str, ...]
    """Of the cases, which are asked about in turn."""
    alone_s: float
    """One process goes through all cases until this much time is over; once at least."""
    ramp_s: float
    """Several processes run this long before verdicts are counted."""
    seconds: float
    """And are counted for this long."""

    @property
    def cases(self) -> list[Case]:
        return [case for case in CASES if case.name in self.names]


class TimedMachine(Machine):
    """A machine that knows how long its last build took, from asking to having the libraries."""

    built_s = 0.0

    def build(
        self, solution: Solution, allowed: Collection[str] = (), inputs_code: str = ""
    ) -> Built:
        started = time.perf_counter()
        try:
            return super().build(solution, allowed, inputs_code)
        finally:
            self.built_s = time.perf_counter() - started


def run_ours(plan: Plan, workers: list[int]) -> Iterator[dict[str, Any]]:
    """A row for one process alone, then one for each number of processes."""
    Path(plan.settings.cache).mkdir(parents=True, exist_ok=True)
    zygote = start_zygote(Path(plan.settings.cache), plan.settings.target)
    try:
        shared = replace(plan, settings=replace(plan.settings, zygote=zygote.address))
        machine = TimedMachine(shared.settings)
        with contextlib.closing(machine):
            about = {"environment": to_json(machine.environment), "harness": harness_hash()}
            about["isolation"] = to_json(machine.isolation)
            yield run_alone(shared, machine) | about
            yield run_alone(shared, machine, ahead=True) | about
        for count in workers:
            yield run_pool(shared, count) | about
    finally:
        zygote.close()


def run_alone(plan: Plan, machine: TimedMachine, ahead: bool = False) -> dict[str, Any]:
    """All cases one after the other, in this process; whole passes, so that the mix is even.

    `ahead`: while one is judged the next one is built, as the pool does it.
    """
    cases = plan.cases
    started = time.perf_counter()
    with _judge(plan, machine) as judge:
        opened_s = time.perf_counter() - started
        began = time.monotonic()

        def go_on(index: int) -> bool:
            return index % len(cases) != 0 or index == 0 or time.monotonic() - began < plan.alone_s

        indices = itertools.takewhile(go_on, itertools.count())
        mark = "ahead" if ahead else "alone"
        made = list(_decisions(plan, judge, machine, indices, began, mark, ahead))
    wall_s = max(decision.finished_s or 0.0 for decision in made)
    return run_row(
        "ours, one, building ahead" if ahead else "ours, one process",
        made, len(made) / wall_s * 60, workers=1, opened_s=round(opened_s, 2),
        wall_s=round(wall_s, 2),
    )  # fmt: skip


def run_pool(plan: Plan, workers: int) -> dict[str, Any]:
    """Verdicts a minute of so many processes that share a device and a warm parent."""
    context = multiprocessing.get_context("spawn")
    shared = (context.Value("i", 0), context.Barrier(workers))
    started = time.time()
    with ProcessPoolExecutor(workers, context, _share, shared) as pool:
        jobs = [pool.submit(_drive, plan, f"{workers}/{number}") for number in range(workers)]
        errors = [error for job in jobs if (error := job.exception()) is not None]
        if errors:  # the others only say that somebody did not come
            raise next((e for e in errors if not isinstance(e, BrokenBarrierError)), errors[0])
        found = [job.result() for job in jobs]
    made = sorted((d for part in found for d in part["decisions"]), key=lambda d: d.finished_s)
    counted = [d for d in made if 0 <= d.finished_s - plan.ramp_s < plan.seconds]
    began, ended = min(part["began"] for part in found), max(part["ended"] for part in found)
    log = plan.settings.lease_log
    return run_row(
        f"ours, {workers} processes", made, len(counted) / plan.seconds * 60, workers=workers,
        opened_s=round(began - started, 2), wall_s=round(ended - began, 2), counted=len(counted),
        counted_from_s=plan.ramp_s, counted_for_s=plan.seconds,
        device_alone_share=round(held_seconds(log, began) / (ended - began), 3) if log else None,
        cpu_share=found[0]["cpu_share"],
    )  # fmt: skip


_shared: tuple[Any, Any] | None = None


def _share(*shared: Any) -> None:
    global _shared
    _shared = shared


def _drive(plan: Plan, mark: str) -> dict[str, Any]:
    """One of several processes: a machine, a judge, and cases until time is over."""
    if _shared is None:
        raise RuntimeError("this process was not told what it shares")
    following, barrier = _shared
    machine = TimedMachine(plan.settings)
    try:
        with contextlib.closing(machine), _judge(plan, machine, mark) as judge:
            barrier.wait(OPENING_S)
            began, clock = time.time(), time.monotonic()
            psutil.cpu_percent()

            def go_on(_: int) -> bool:
                return time.monotonic() - clock < plan.ramp_s + plan.seconds

            indices = itertools.takewhile(go_on, iter(lambda: _take(following), None))
            made = list(_decisions(plan, judge, machine, indices, clock, mark.partition("/")[0]))
            share = psutil.cpu_percent() / 100
            return {"decisions": made, "began": began, "ended": time.time(), "cpu_share": share}
    except BaseException:
        barrier.abort()  # nobody waits for one that will not come
        raise


def _take(counter: Any) -> int:
    with counter.get_lock():
        counter.value += 1
        return int(counter.value) - 1


@contextlib.contextmanager
def _judge(plan: Plan, machine: TimedMachine, mark: str = "alone") -> Iterator[Judge]:
    """A judge of the problem that has given a verdict already."""
    subject, target = SUBJECTS[plan.subject], plan.settings.target
    # Outside the band of a data set it is a doubt about the problem, not about its verdicts.
    judge, _ = open_judge(subject.problem(target), machine, accept_problem=True)
    with judge:
        verdict = judge.verify(plan.cases[0].solution(subject, target, f"warm {mark}"), EFFORT)
        if verdict.status is VerdictStatus.REFERENCE_ERROR:
            raise RuntimeError(f"the reference does not run here: {verdict.reason}")
        yield judge


def _decisions(
    plan: Plan,
    judge: Judge,
    machine: TimedMachine,
    indices: Iterator[int],
    began: float,
    mark: str,
    ahead: bool = False,
) -> Iterator[Decision]:
    subject, cases = SUBJECTS[plan.subject], plan.cases

    def made(index: int) -> Solution:
        case = cases[index % len(cases)]
        return case.solution(subject, plan.settings.target, f"{mark} {index}")

    for index in indices:
        case, solution = cases[index % len(cases)], made(index)
        if ahead:
            machine.build_ahead(made(index + 1))
        yield _decide(case, machine, began, functools.partial(judge.verify, solution, EFFORT))


def _decide(
    case: Case, machine: TimedMachine, began: float, verify: Callable[[], Verdict]
) -> Decision:
    """Unmeasured counts as accepted: it is paid as correct."""
    machine.built_s = 0.0
    started = time.perf_counter()
    try:
        verdict = verify()
    except Exception as error:  # no decision, and so an error of ours in the table
        return Decision(
            case=case.name, kind=case.kind, accepted=None, seconds=time.perf_counter() - started,
            finished_s=time.monotonic() - began, reason=f"{type(error).__name__}: {error}",
        )  # fmt: skip
    seconds = time.perf_counter() - started
    failed = verdict.status is VerdictStatus.REFERENCE_ERROR
    return Decision(
        case=case.name,
        kind=case.kind,
        accepted=None if failed else verdict.passed,
        seconds=round(seconds, 4),
        finished_s=round(time.monotonic() - began, 4),
        build_s=round(machine.built_s, 4),
        claimed_ms=verdict.solution.median_ms if verdict.solution else None,
        status=str(verdict.status),
        reason=verdict.reason[:300],
        more=_speedups(verdict),
    )


def _speedups(verdict: Verdict) -> dict[str, Any]:
    found = {"over_eager": verdict.speedup_eager, "over_compile": verdict.speedup_compile}
    return {name: to_json(ratio) for name, ratio in found.items() if ratio is not None}


def plan_of(options: Any, names: tuple[str, ...], root: Path) -> Plan:
    """The plan of the command line, with everything it keeps below `root`."""
    target = Target(options.target)
    settings = MachineSettings(
        target=target,
        device="cpu" if target is Target.CPU else options.device,
        store=str(root / "store"),
        cache=str(root / "cache"),
        device_memory_gib=options.device_memory_gib,
        lease_log=str(root / "lease.log"),
    )
    return Plan(
        settings=settings, subject=options.problem, names=names, alone_s=options.alone_s,
        ramp_s=options.ramp_s, seconds=options.seconds,
    )  # fmt: skip
