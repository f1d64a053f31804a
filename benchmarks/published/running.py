"""Verdicts on published kernels by several processes that share a device and a warm parent.

Each process has a machine and the judges of the problems it was asked about last, as a worker of
the server has. One that dies costs the kernel it was at, and another takes its place.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks.published.records import Published
from schemas.codec import content_key, to_json
from verification.folder import FolderError, problem_of, solution_of
from verification.judge import Policy, harness_hash
from verification.machine import Machine, MachineSettings, start_zygote
from verification.service.pool_process import Job
from verification.service.pool_worker import Judges

Answer = dict[str, Any]
"""What `Judges.answer` gives, and `seconds` and `problem_id`, `solution_id` where known."""
STARTS = 3
"""How often a process is started in the place of one that died before it was ready."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How verdicts are made."""

    settings: MachineSettings
    effort: str
    workers: int
    seconds: float
    """After this long no verdict is begun."""
    accept_problem: bool = False


def answers(
    plan: Plan, published: Sequence[Published], told: Callable[[dict[str, Any]], None]
) -> Iterator[tuple[Published, Answer]]:
    """An answer for each kernel, in the order in which they come; fewer when time is over.

    `told` gets environment, isolation and harness from every process. Raises RuntimeError when no
    process can judge here.
    """
    Path(plan.settings.cache).mkdir(parents=True, exist_ok=True)
    zygote = start_zygote(Path(plan.settings.cache), plan.settings.target)
    shared = replace(plan, settings=replace(plan.settings, zygote=zygote.address))
    crew = _Crew(shared)
    try:
        yield from crew.work(published, told)
    finally:
        crew.close()
        zygote.close()


@dataclass(eq=False, kw_only=True)
class _Worker:
    process: Any
    channel: Connection
    ready: bool = False
    at: Published | None = None
    began: float = 0.0


class _Crew:
    """Worker processes, and who is at what."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []
        self._died_young = 0

    def work(
        self, published: Sequence[Published], told: Callable[[dict[str, Any]], None]
    ) -> Iterator[tuple[Published, Answer]]:
        queue, until = deque(published), time.monotonic() + self._plan.seconds
        for _ in range(min(self._plan.workers, len(queue))):
            self._start()
        while self._workers:
            channels = {worker.channel: worker for worker in self._workers}
            for channel in wait(list(channels)):
                worker = channels[channel]  # type: ignore[index]
                try:
                    said = worker.channel.recv()
                except (EOFError, OSError):
                    if worker.at is not None:
                        yield worker.at, self._lost(worker)
                    self._bury(worker, bool(queue))
                    continue
                if worker.at is None:
                    worker.ready = True
                    told(said)
                else:
                    yield worker.at, said
                self._give(worker, queue, until)

    def _give(self, worker: _Worker, queue: deque[Published], until: float) -> None:
        """The next kernel, or the end."""
        if not queue or time.monotonic() > until:
            worker.channel.close()
            self._workers.remove(worker)
            worker.process.join()
            return
        worker.at, worker.began = queue.popleft(), time.perf_counter()
        with contextlib.suppress(OSError):  # it has died, which the next reading says
            worker.channel.send(worker.at)

    def _start(self) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_work, args=(self._plan, theirs), daemon=True)
        process.start()
        theirs.close()
        self._workers.append(_Worker(process=process, channel=ours))

    def _lost(self, worker: _Worker) -> Answer:
        worker.process.join()
        why = f"the judge's process ended with code {worker.process.exitcode}"
        return {"error": why, "seconds": round(time.perf_counter() - worker.began, 1)}

    def _bury(self, worker: _Worker, more: bool) -> None:
        worker.process.join()
        worker.channel.close()
        self._workers.remove(worker)
        self._died_young += not worker.ready
        if self._died_young >= STARTS:
            raise RuntimeError("no process can judge here; its own message is on stderr")
        if more:
            self._start()

    def close(self) -> None:
        for worker in self._workers:
            worker.process.terminate()
            worker.process.join()


def _work(plan: Plan, channel: Connection) -> None:
    """A worker process: kernels in, answers out, until the other end closes."""
    machine = Machine(plan.settings)
    opened: dict[str, Judges] = {}
    try:
        about = {"environment": machine.environment, "isolation": machine.isolation}
        channel.send({**to_json(about), "harness": harness_hash()})
        while True:
            published = channel.recv()
            key = content_key(published.problem_code, published.libraries, published.off)
            if key not in opened:
                # One at a time: a reference's process holds device memory.
                _close(opened)
                policy = Policy(
                    libraries=frozenset(published.libraries),
                    off=frozenset(published.off),
                    partial_isolation=True,
                )
                opened[key] = Judges(machine, policy)
            channel.send(_answer(plan, published, opened[key]))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    finally:
        _close(opened)
        machine.close()


def _close(opened: dict[str, Judges]) -> None:
    while opened:
        opened.popitem()[1].close()


def _answer(plan: Plan, published: Published, judges: Judges) -> Answer:
    started = time.perf_counter()
    try:
        problem = problem_of(published.problem_code, plan.settings.target, published.precision)
        # A form with files beside it cannot be read from a folder: it is a record of its own.
        solution = (
            published.solution
            if published.form == "load_inline"
            else solution_of(published.files, published.form)
        )
    except FolderError as error:
        return {"unreadable": str(error), "about": error.about, "seconds": 0.0}
    job = Job(
        problem=problem,
        solution=solution,
        effort=plan.effort,
        accept_problem=plan.accept_problem,
    )
    return {
        **judges.answer(job),
        "problem_id": problem.problem_id,
        "solution_id": solution.solution_id,
        "seconds": round(time.perf_counter() - started, 1),
    }
