"""A worker process of the pool, from outside: started, asked, ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas.codec import content_key, to_json
from schemas.records import Problem, Solution
from verification.machine import MachineSettings

ROOT = Path(__file__).resolve().parents[2]
STUCK_STEPS = 40
"""Steps' worth of time after which a worker that does not answer is killed."""
START_S, END_S = 300.0, 10.0
MAX_ANSWER_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Job:
    """One thing to judge."""

    problem: Problem
    solution: Solution
    effort: str
    accept_problem: bool

    @property
    def key(self) -> str:
        """Equal for jobs with equal answers."""
        return content_key(
            self.problem.problem_id, self.solution.solution_id, self.effort, self.accept_problem
        )


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a worker process gets: a job to answer, and one whose solution it builds meanwhile."""

    job: Job
    ahead: Job | None = None


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """What a worker process is told; see `verification.policy.Policy` for the last two."""

    machine: MachineSettings
    libraries: tuple[str, ...] = ()
    partial_isolation: bool = False


class WorkerGone(Exception):
    """A worker process ended, or never started."""


class Process:
    """A worker process: an async context manager that ends it."""

    def __init__(self, settings: WorkerSettings, environment: dict[str, str]) -> None:
        self._settings = settings
        self._environment = environment
        self._limit_s = STUCK_STEPS * settings.machine.problem_timeout_s

    async def __aenter__(self) -> Process:
        try:
            await self._start()
        except OSError as error:
            raise WorkerGone(f"it cannot be started: {error}") from error
        self.ended = asyncio.create_task(self._process.wait())
        self.pid = self._process.pid
        try:
            about = await self._receive(START_S)
            if "failed" in about:
                raise WorkerGone(about["failed"])
        except BaseException:
            await self._end(0.0)
            raise
        self.about = about
        return self

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "verification.service.pool_worker", str(theirs.fileno())),
                json.dumps(to_json(self._settings)),
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                env=self._environment,
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the server, which lets it finish
            )
        self._reader, self._writer = await asyncio.open_connection(
            sock=ours, limit=MAX_ANSWER_BYTES
        )

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self._end(END_S if kind is asyncio.CancelledError else 0.0)

    async def ask(self, job: Job, ahead: Job | None = None) -> dict[str, Any]:
        """Raises WorkerGone when it dies over it or does not answer."""
        try:
            order = Order(job=job, ahead=ahead)
            self._writer.write(json.dumps(to_json(order)).encode() + b"\n")
            await self._writer.drain()
        except OSError as error:
            raise WorkerGone(f"it does not listen: {error}") from error
        return await self._receive(self._limit_s)

    async def _receive(self, limit_s: float) -> dict[str, Any]:
        try:
            line = await asyncio.wait_for(self._reader.readline(), limit_s)
            if line.endswith(b"\n"):
                return json.loads(line)
        except TimeoutError:
            raise WorkerGone(f"no answer within {limit_s:g} s") from None
        except (OSError, ValueError) as error:
            raise WorkerGone(f"no answer: {error}") from error
        raise WorkerGone(ending(await self.ended))

    async def _end(self, patience_s: float) -> None:
        """Close its channel, at which it ends by itself, and kill it after `patience_s`."""
        self._writer.close()
        await asyncio.wait((self.ended,), timeout=patience_s)
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        await self.ended


def ending(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
