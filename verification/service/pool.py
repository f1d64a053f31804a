"""A pool of worker processes that judge: a bounded queue before them, nothing lost behind it.

    Pool            queue, who gets what, what is known already          this process, one thread
    worker process  a machine, a few open judges                         pool_worker.py
    warm parent     forks the confined processes of all of them          runtime.zygote

Several workers share a device: the device's lease lets one measure while others build or check, and
what waits longest is built by one that is busy with something else. A job goes to a worker that has
its problem open, unless something has waited for too long; so baselines are compiled once per
problem and worker. A worker that dies is started again and its job asked once more.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from schemas.records import VerdictStatus
from verification.service.pool_process import Job, Process, WorkerGone, WorkerSettings, ending

ATTEMPTS = 2
PATIENCE_S = 20.0
"""How long a job may wait while others are preferred because their problem is open."""
BACKOFF_S = (0.2, 1.0, 5.0, 15.0, 60.0)
"""Before a worker is started again, by how often in a row it has died young."""
KEPT_ANSWERS = 1024
_NO_VERDICT = {422: "problem_refused", 500: "failed", 503: "shutting_down"}
RATE_WINDOW_S = 60.0


class QueueFull(Exception):
    """No more may wait; ask again after `retry_s` seconds."""

    def __init__(self, retry_s: int) -> None:
        super().__init__(f"the queue is full, ask again in {retry_s} s")
        self.retry_s = retry_s


class Closing(Exception):
    """The pool finishes what runs and takes nothing new."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a job ended with; `status` is HTTP's: 200, 422 (the problem is refused), 500, 503."""

    status: int
    body: dict[str, Any]


@dataclass(eq=False, kw_only=True)
class Ticket:
    """A job that somebody waits for."""

    job: Job
    answer: asyncio.Future[Answer]
    asked: float = field(default_factory=time.monotonic)
    attempts: int = 0
    built_ahead: bool = False


@dataclass(eq=False, kw_only=True)
class _Worker:
    number: int
    settings: WorkerSettings
    state: str = "starting"
    pid: int | None = None
    open: tuple[str, ...] = ()
    starts: int = 0
    failure: str | None = None
    about: dict[str, Any] = field(default_factory=dict)


class Pool:
    """Jobs in, answers out. All methods are called from one event loop."""

    def __init__(
        self, workers: Sequence[WorkerSettings], max_queue: int, hidden: Sequence[str] = ()
    ) -> None:
        """`workers`: one per worker process. `hidden`: variables that workers must not inherit."""
        self._workers = [_Worker(number=i, settings=s) for i, s in enumerate(workers)]
        self._max_queue = max_queue
        self._environment = {k: v for k, v in os.environ.items() if k not in hidden}
        self._queue: deque[Ticket] = deque()
        self._idle: dict[_Worker, asyncio.Future[Ticket]] = {}
        self._open: dict[str, Ticket] = {}
        self._known: OrderedDict[str, Answer] = OrderedDict()
        self._running: set[Ticket] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False
        self._finished: deque[float] = deque()
        self._counts: Counter[str] = Counter()
        self._started = time.monotonic()

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._run(worker)) for worker in self._workers]

    def submit(self, job: Job) -> asyncio.Future[Answer]:
        """The answer to come; the same for equal jobs. Raises QueueFull or Closing."""
        if (known := self._known.get(job.key)) is not None:
            self._known.move_to_end(job.key)
            answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
            answer.set_result(known)
            return answer
        if self._closing:
            raise Closing("the verifier is shutting down")
        if (same := self._open.get(job.key)) is not None:
            return same.answer
        if len(self._queue) >= self._max_queue:
            raise QueueFull(self._retry_s())
        ticket = Ticket(job=job, answer=asyncio.get_running_loop().create_future())
        self._open[job.key] = ticket
        self._queue.append(ticket)
        self._deal()
        return ticket.answer

    def _deal(self) -> None:
        """Give what waits to who is idle."""
        while self._queue and self._idle:
            problem_id = self._queue[0].job.problem.problem_id
            # One that has the problem open, else the one with the fewest, else the first.
            worker = min(self._idle, key=lambda w: (problem_id not in w.open, len(w.open)))
            self._idle.pop(worker).set_result(self._choose(worker))

    def _choose(self, worker: _Worker) -> Ticket:
        oldest = self._queue[0]
        if time.monotonic() - oldest.asked < PATIENCE_S:
            preferred = (t for t in self._queue if t.job.problem.problem_id in worker.open)
            oldest = next(preferred, oldest)
        self._queue.remove(oldest)
        return oldest

    async def _next(self, worker: _Worker, ended: asyncio.Task[int]) -> Ticket:
        """Raises WorkerGone when the worker dies while it has nothing to do."""
        turn: asyncio.Future[Ticket] = asyncio.get_running_loop().create_future()
        worker.state = "idle"
        self._idle[worker] = turn
        self._deal()
        try:
            await asyncio.wait((ended, turn), return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise WorkerGone(ending(ended.result()))
            return turn.result()
        except BaseException:
            self._idle.pop(worker, None)
            if turn.done():  # given to it in the same instant
                self._queue.appendleft(turn.result())
                self._deal()
            raise

    async def _run(self, worker: _Worker) -> None:
        """Keep one worker process alive and busy."""
        deaths = 0
        while True:
            served = 0
            worker.starts += 1
            try:
                async with Process(worker.settings, self._environment) as process:
                    worker.pid, worker.about = process.pid, process.about
                    while True:
                        await self._serve(worker, process)
                        served += 1
            except WorkerGone as error:
                worker.failure = str(error)
                print(f"worker {worker.number}: {error}", file=sys.stderr, flush=True)
            deaths = 0 if served else deaths + 1
            worker.state, worker.open, worker.pid = "starting", (), None
            await asyncio.sleep(BACKOFF_S[min(deaths, len(BACKOFF_S) - 1)])

    async def _serve(self, worker: _Worker, process: Process) -> None:
        """One job. A worker that dies over it leaves the job first in the queue, once."""
        ticket = await self._next(worker, process.ended)
        self._running.add(ticket)
        worker.state = "busy"
        ticket.attempts += 1
        try:
            reply = await process.ask(ticket.job, self._ahead())
        except WorkerGone as error:
            if ticket.attempts < ATTEMPTS:
                self._queue.appendleft(ticket)
                self._deal()
            else:
                reason = f"{ATTEMPTS} workers died over this job, the last one: {error}"
                self._finish(ticket, Answer(status=500, body={"error": reason}))
            raise
        finally:
            self._running.discard(ticket)
        worker.open = tuple(reply.pop("open", ()))
        self._finish(ticket, _as_answer(reply))

    def _ahead(self) -> Job | None:
        """What waits longest and nobody has been asked to build yet."""
        for ticket in self._queue:
            if not ticket.built_ahead:
                ticket.built_ahead = True
                return ticket.job
        return None

    def _finish(self, ticket: Ticket, answer: Answer) -> None:
        self._open.pop(ticket.job.key, None)
        status = answer.body.get("verdict", {}).get("status", _NO_VERDICT.get(answer.status))
        self._counts[status] += 1
        self._finished.append(time.monotonic())
        # A failure of ours says nothing about the job: the next one who asks tries again.
        if answer.status in (200, 422) and status != VerdictStatus.REFERENCE_ERROR:
            self._known[ticket.job.key] = answer
            while len(self._known) > KEPT_ANSWERS:
                self._known.popitem(last=False)
        if not ticket.answer.done():
            ticket.answer.set_result(answer)

    def _per_minute(self) -> float:
        now = time.monotonic()
        while self._finished and now - self._finished[0] > RATE_WINDOW_S:
            self._finished.popleft()
        window = min(RATE_WINDOW_S, max(1.0, now - self._started))
        return len(self._finished) / window * 60.0

    def _retry_s(self) -> int:
        """When a tenth of the queue should be through, at the rate of the last minute."""
        rate = self._per_minute() / 60.0
        return int(min(30.0, max(1.0, len(self._queue) / 10 / rate if rate else 5.0)))

    @property
    def ready(self) -> bool:
        return any(worker.state in ("idle", "busy") for worker in self._workers)

    @property
    def hopeless(self) -> str | None:
        """Why no worker starts, when none ever has and each was tried three times."""
        if any(worker.about or worker.starts < 3 for worker in self._workers):
            return None
        return self._workers[0].failure

    def stats(self) -> dict[str, Any]:
        """Plain values for /stats."""
        return {
            "queue": len(self._queue),
            "queue_limit": self._max_queue,
            "running": len(self._running),
            "verdicts_per_minute": round(self._per_minute(), 2),
            "by_status": dict(self._counts),
            "uptime_s": round(time.monotonic() - self._started, 1),
            "closing": self._closing,
            "workers": [
                {
                    "number": worker.number,
                    "device": worker.settings.machine.device,
                    "state": worker.state,
                    "pid": worker.pid,
                    "open_problems": list(worker.open),
                    "starts": worker.starts,
                    "last_failure": worker.failure,
                }
                for worker in self._workers
            ],
        }

    def about(self) -> dict[str, Any]:
        """Environment and isolation as the first worker that is ready found them."""
        return next((dict(worker.about) for worker in self._workers if worker.about), {})

    async def drain(self) -> None:
        """Take nothing new, tell those who wait, finish what runs."""
        self._closing = True
        while self._queue or self._running:  # a worker that dies meanwhile puts its job back
            while self._queue:
                body = {"error": "the verifier is shutting down"}
                self._finish(self._queue.popleft(), Answer(status=503, body=body))
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        """End every worker process."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _as_answer(reply: dict[str, Any]) -> Answer:
    if "verdict" in reply:
        return Answer(status=200, body=reply)
    if "refused" in reply:
        return Answer(status=422, body={"error": reply["refused"], "about": "problem"})
    return Answer(status=500, body={"error": reply.get("error", "no answer")})


def devices(target: str, named: str | None, workers_per_device: int) -> list[str]:
    """A device for each worker, dealt out so that the first ones of all devices come first."""
    found = named.split(",") if named else _all_devices(target)
    return [device.strip() for device in found] * workers_per_device


def _all_devices(target: str) -> list[str]:
    if target == "cpu":
        return ["cpu"]
    import torch  # only here: the server itself needs neither torch nor a device

    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]
