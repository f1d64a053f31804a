"""One worker of the pool: a machine, a few open judges, and jobs answered one after the other.

Run by `pool` as `python -m verification.service.pool_worker FD SETTINGS`. Jobs and answers
are JSON, one line each. It ends when the pool's end of the channel closes.
"""

from __future__ import annotations

import json
import socket
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from runtime.sandbox import ParentGone
from schemas.codec import from_json, to_json
from schemas.records import Admission, Verdict
from verification.admission import is_meaningless
from verification.check import ProblemRefused, doubt, open_judge
from verification.judge import Judge
from verification.machine import Machine
from verification.policy import Policy
from verification.service.pool_process import Job, Order, WorkerSettings
from verification.workers.inputs import without_model

OPEN_JUDGES = 2
"""Each keeps a reference process, with the inputs of its problem and its baselines compiled."""


class Judges:
    """A machine with the judges of the problems it was asked about last."""

    def __init__(self, machine: Machine, policy: Policy | None = None) -> None:
        self._machine = machine
        self._policy = policy or Policy()
        self._judges: OrderedDict[str, tuple[Judge, Admission]] = OrderedDict()

    def answer(self, job: Job) -> dict[str, Any]:
        """The verdict, or why there is none: {"verdict", "doubt"}, {"refused"} or {"error"}."""
        try:
            try:
                admission, verdict = self._judge(job)
            except ParentGone:  # another problem may have killed it, and costs only this attempt
                self._drop(job.problem.problem_id)
                admission, verdict = self._judge(job)
        except ProblemRefused as refusal:
            return {"refused": str(refusal), "reason": str(refusal.admission.reason)}
        except Exception as error:
            self._drop(job.problem.problem_id)
            return {"error": f"{type(error).__name__}: {error}"}
        return {"verdict": to_json(verdict), "doubt": doubt(admission)}

    def _judge(self, job: Job) -> tuple[Admission, Verdict]:
        key = job.problem.problem_id
        if key not in self._judges:
            while len(self._judges) >= OPEN_JUDGES:
                self._drop(next(iter(self._judges)))
            self._judges[key] = open_judge(
                job.problem, self._machine, job.accept_problem, self._policy
            )
        self._judges.move_to_end(key)
        judge, admission = self._judges[key]
        if is_meaningless(admission) and not job.accept_problem:  # opened for who accepts it
            raise ProblemRefused(admission, doubt(admission) or "")
        return admission, judge.verify(job.solution, job.effort)

    @property
    def open_problems(self) -> list[str]:
        return list(self._judges)

    def _drop(self, problem_id: str) -> None:
        if problem_id in self._judges:
            self._judges.pop(problem_id)[0].close()

    def close(self) -> None:
        for problem_id in self.open_problems:
            self._drop(problem_id)


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    told = from_json(WorkerSettings, json.loads(sys.argv[2]))
    machine = Machine(told.machine)
    policy = Policy(libraries=frozenset(told.libraries), partial_isolation=told.partial_isolation)
    judges = Judges(machine, policy)

    def send(message: dict[str, Any]) -> None:
        channel.sendall(json.dumps(message).encode() + b"\n")

    try:
        if _introduce(machine, send):
            for line in channel.makefile("rb"):
                order = from_json(Order, json.loads(line))
                if order.ahead is not None:
                    _build_ahead(machine, order.ahead, policy)
                answer = judges.answer(order.job)
                send({**answer, "open": judges.open_problems})
    except BrokenPipeError:
        pass  # the pool has gone meanwhile; its answer is in the store
    finally:
        judges.close()
        machine.close()


def _build_ahead(machine: Machine, job: Job, policy: Policy) -> None:
    try:
        inputs_code = without_model(job.problem.code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return  # which its own turn will say
    machine.build_ahead(job.solution, policy.libraries, inputs_code)


def _introduce(machine: Machine, send: Callable[[dict[str, Any]], None]) -> bool:
    """Say what this worker measures on, or why it cannot."""
    try:
        about = {"environment": machine.environment, "isolation": machine.isolation}
    except Exception as error:
        send({"failed": f"{machine.device}: {type(error).__name__}: {error}"})
        return False
    send(to_json(about))
    return True


if __name__ == "__main__":
    main()
