"""The judge: (problem, solution) to Verdict. It imports no solution code and no reference code.

    judge            builds, asks, compares clocks, decides           this process
    reference worker problem's code, fp64, eager and torch.compile    verification.reference_worker
    solution worker  solution's code, unprivileged and offline        verification.solution_worker

A `Judge` serves one problem: its reference worker stays for all the solutions of a rollout, each
solution gets a worker of its own. Verdicts are kept in the store, so nothing finished is
measured twice.

Not covered yet: which kernels ran and whose they are; code that reaches into its own worker, which
could compute when an output is asked for instead of when it is timed, leave out the flush before a
call (0.13 ms on a GPU), or keep the device busy while a baseline is timed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from runtime.sandbox import RemoteError, Worker, WorkerError, WorkerOutOfMemory
from schemas.codec import content_key, from_json, to_json
from schemas.records import (
    Admission,
    Interval,
    Isolation,
    Problem,
    Solution,
    Verdict,
    VerdictStatus,
)
from verification import timing
from verification.build import Build, BuildError, BuildTimeout
from verification.inputs import without_model
from verification.machine import Machine
from verification.room import was_full, with_room
from verification.trial import Refusal, Trial, fresh_seed

TIMING_ATTEMPTS = 3
FLOOR_SHARE = 0.8
"""Of the roofline, which is at the copy rate: reading alone can be an eighth faster."""
FLOOR_BYTES = 256 << 20
"""Problems that move less may sit in a cache, where the copy rate of the memory is no floor."""


class Judge:
    """Verdicts on solutions of one admitted problem; a context manager that ends its workers."""

    def __init__(self, problem: Problem, admission: Admission, machine: Machine) -> None:
        self._problem = problem
        self._admission = admission
        self._machine = machine
        self._reference: Worker | None = None
        self._mail = contextlib.ExitStack()
        self._mail_folder = ""
        self._renew_mail = False
        self._inputs_code = without_model(problem.code)

    def __enter__(self) -> Judge:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the reference's worker; the next solution gets a new one."""
        if self._reference is not None:
            self._machine.end(self._reference)
            self._reference = None
        self._mail.close()

    def verify(self, solution: Solution, effort: str = "reward") -> Verdict:
        """Judge a solution; from the store if this harness has measured it here before."""
        key = content_key(
            harness_hash(), self._problem.problem_id, solution.solution_id, effort,
            self._machine.environment,
        )  # fmt: skip
        found = self._machine.recall("verdicts", key)
        if found is not None:
            return from_json(Verdict, found)
        verdict = with_room(
            lambda: self._measure(solution, effort), _no_room, self._machine.room_pauses_s
        )
        if verdict.status is not VerdictStatus.REFERENCE_ERROR:
            limited = verdict.status in (VerdictStatus.TIMEOUT, VerdictStatus.OUT_OF_MEMORY)
            self._machine.remember("verdicts", key, to_json(verdict), limited)
        return verdict

    def _measure(self, solution: Solution, effort: str) -> Verdict:
        record = _Draft(self._problem, self._admission, solution, effort, self._machine)
        try:
            record.build = self._machine.build(solution)
            with (
                self._machine.scratch() as scratch,
                self._bench(solution, scratch, record) as trial,
            ):
                self._try(trial, effort, record)
        except BuildTimeout as error:
            return record.refused(VerdictStatus.TIMEOUT, str(error))
        except BuildError as error:
            return record.refused(VerdictStatus.BUILD_ERROR, str(error))
        except Refusal as error:
            self._renew_mail = True
            if error.status is VerdictStatus.OUT_OF_MEMORY:
                self.close()  # what the reference holds is somebody's room
            return record.refused(error.status, error.reason)
        except WorkerError as error:
            self.close()
            return record.refused(VerdictStatus.REFERENCE_ERROR, f"{error.kind}: {error}")
        return record.timed()

    @contextlib.contextmanager
    def _bench(self, solution: Solution, scratch: Path, record: _Draft) -> Iterator[Trial]:
        """A trial with both workers ready and the solution loaded."""
        for source in solution.files:
            file = scratch / source.path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(source.text)
            file.chmod(0o644)
            file.parent.chmod(0o755 if file.parent != scratch else 0o777)
        machine, state_seed = self._machine, fresh_seed()
        library = str(machine.public(_built(record)))
        reference = self._ready_reference()
        state = str(scratch / "state.pt")
        given = machine.ask(
            reference, "set_state", seed=state_seed, path=state, renew_mail=self._renew_mail
        )
        self._renew_mail = False
        worker = machine.spawn(
            "verification.solution_worker:handlers",
            "solution",
            scratch=str(scratch),
            precision=str(self._problem.precision),
            inputs_code=self._inputs_code,
            log=str(scratch / "log"),
            mail=self._mail_folder,
        )
        trial = Trial(machine, reference, worker, state_seed)
        record.trial = trial
        try:
            record.isolation = from_json(Isolation, machine.open(worker)["isolation"])
            machine.ask(worker, "load")
            trial.load(library, state, given["init_inputs"])
            yield trial
        finally:
            machine.end(worker)

    def _ready_reference(self) -> Worker:
        """The reference's worker, loaded and with its baseline compiled."""
        if self._reference is None:
            machine = self._machine
            folder = self._mail.enter_context(machine.scratch())
            folder.chmod(0o755)
            self._mail_folder = str(folder)
            self._reference = open_reference(self._problem, machine, self._mail_folder)
            machine.ask(self._reference, "make_example", seed=fresh_seed())
            if not machine.compile(self._reference):
                with machine.lease.exclusive():
                    self._reference.call("first_run", machine.timeout_s)
        return self._reference

    def _try(self, trial: Trial, effort: str, record: _Draft) -> None:
        trial.check_draws()
        for _ in range(TIMING_ATTEMPTS):
            trial.make_rings()
            trial.measure(effort)
            trial.check_timed()
            if record.steady():
                return


class _Draft:
    """A verdict being written."""

    def __init__(
        self,
        problem: Problem,
        admission: Admission,
        solution: Solution,
        effort: str,
        machine: Machine,
    ) -> None:
        self._common: dict[str, Any] = {
            "problem_id": problem.problem_id,
            "solution_id": solution.solution_id,
            "effort": effort,
            "roofline_ms": admission.roofline_ms,
            "headroom": admission.headroom,
            "environment": machine.environment,
            "harness": harness_hash(),
        }
        self._admission = admission
        self._target = str(machine.target)
        self.build: Build | None = None
        self.trial: Trial | None = None
        self.isolation: Isolation | None = None

    def _verdict(self, status: VerdictStatus, reason: str, **measured: Any) -> Verdict:
        nothing = dict.fromkeys(
            ("solution", "eager", "compile", "speedup_eager", "speedup_compile", "aa_control")
        )
        return Verdict(
            status=status,
            reason=reason,
            checks=tuple(self.trial.checks) if self.trial else (),
            isolation=self.isolation,
            build_s=self.build.build_s if self.build else None,
            binary_hash=self.build.binary_hash if self.build else None,
            **self._common,
            **{**nothing, **measured},
        )

    def refused(self, status: VerdictStatus, reason: str) -> Verdict:
        return self._verdict(status, reason)

    def _control(self) -> Interval:
        rounds = self._rounds()
        return timing.speedup(rounds["compile"], rounds["control"])

    def _rounds(self) -> dict[str, list[list[float]]]:
        if self.trial is None:
            raise RuntimeError("nothing was timed")
        return self.trial.rounds

    def steady(self) -> bool:
        """Whether the control is 1 within tolerance; a solution far behind needs no such care."""
        if self.trial is not None and self.trial.cut_short:
            return True
        return abs(self._control().point - 1.0) <= timing.AA_TOLERANCE[self._target]

    def timed(self) -> Verdict:
        """The verdict when every check passed: CORRECT with speedups, or UNMEASURED and why."""
        rounds, clock = self._rounds(), self.trial.clock if self.trial else ""
        measured: dict[str, Any] = {
            side: timing.measurement(rounds[side], clock)
            for side in ("eager", "compile", "solution")
        }
        measured["aa_control"] = control = self._control()
        if not self.steady():
            reason = (
                f"the A/A control is {control.point:.3f}, "
                f"expected 1 within {timing.AA_TOLERANCE[self._target]}"
            )
            return self._verdict(VerdictStatus.UNMEASURED, reason, **measured)
        if self._below_floor(measured["solution"].median_ms):
            reason = f"{measured['solution'].median_ms:.4f} ms is below the roofline"
            return self._verdict(VerdictStatus.UNMEASURED, reason, **measured)
        for side in ("eager", "compile"):
            measured[f"speedup_{side}"] = timing.speedup(rounds[side], rounds["solution"])
        return self._verdict(VerdictStatus.CORRECT, "", **measured)

    def _below_floor(self, median_ms: float) -> bool:
        floor, moved = self._admission.roofline_ms, self._admission.min_bytes
        if floor is None or moved is None or moved < FLOOR_BYTES:
            return False
        return median_ms < FLOOR_SHARE * floor


def open_reference(problem: Problem, machine: Machine, mail: str = "") -> Worker:
    """A reference worker with its problem loaded. Raises WorkerError.

    `mail`: the folder through which it gets the outputs it is to check.
    """
    worker = machine.spawn(
        "verification.reference_worker:handlers",
        "reference",
        code=problem.code,
        precision=str(problem.precision),
        state_seed=fresh_seed(),
        compile_cache=str(machine.cache / "compiled"),
        mail=mail,
    )
    try:
        machine.open(worker)
        machine.ask(worker, "load")
    except RemoteError:
        machine.end(worker)
        raise
    return worker


def _no_room(verdict: Verdict) -> bool:
    """On either side."""
    ours = verdict.status is VerdictStatus.REFERENCE_ERROR
    theirs = verdict.status is VerdictStatus.OUT_OF_MEMORY
    full = theirs or (ours and verdict.reason.startswith(f"{WorkerOutOfMemory.kind}:"))
    return full and was_full(verdict.reason)


def _built(record: _Draft) -> Build:
    if record.build is None:
        raise RuntimeError("nothing was built")
    return record.build


@functools.cache
def harness_hash() -> str:
    """The hash of every source file a verdict depends on."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for folder in ("runtime", "schemas", "verification"):
        for file in sorted((root / folder).glob("*.py")):
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]
