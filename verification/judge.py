"""The judge: (problem, solution) to Verdict. It imports no solution code and no reference code.

    judge            builds, asks, compares clocks, decides           this process
    reference worker problem's code, fp64, eager and torch.compile    workers/reference_worker.py
    solution worker  solution's code, unprivileged and offline        workers/solution_worker.py

A `Judge` serves one problem: its reference worker stays for all the solutions of a rollout, each
solution gets a worker of its own (at the effort `publish` several). Verdicts are kept in the
store, so nothing finished is measured twice.

    build, audit of the binary          building/build.py, building/binary.py
    right, and whose work               checking.py
    how fast, beside the baselines      measuring.py
    with its own kernels dead: wrong?   here
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from runtime.sandbox import RemoteError, Worker, WorkerError, WorkerOutOfMemory
from schemas.codec import content_key, from_json, to_json
from schemas.records import (
    Admission,
    Attribution,
    Isolation,
    Problem,
    Solution,
    Verdict,
    VerdictStatus,
)
from verification import timing
from verification.bench import Bench, Refusal, fresh_seed
from verification.building.build import BuildError, BuildTimeout
from verification.building.built import Built, write_files
from verification.checking import check_solution, label_solution
from verification.draft import Draft
from verification.gpu import channels
from verification.guards import Guard, switched
from verification.harness import harness_hash
from verification.machine import Machine
from verification.measuring import Stopwatch
from verification.policy import Policy, require_full
from verification.room import was_full, with_room
from verification.workers.inputs import without_model

TIMING_ATTEMPTS = 3
SPARE_PROCESSES = 2
PROCESS_REPLACED = "process_replaced"
"""Label: the times of a process were left out, because the machine was not quiet beside it."""
KILL_ATTEMPTS = {VerdictStatus.CRASH: 3, VerdictStatus.REFERENCE_ERROR: 6}
"""Whoever's worker was killed. A solution may kill its own, and has it measured again for that; of
the reference's it can reach nothing."""


class Judge:
    """Verdicts on solutions of one admitted problem; a context manager that ends its workers."""

    def __init__(
        self,
        problem: Problem,
        admission: Admission,
        machine: Machine,
        policy: Policy | None = None,
    ) -> None:
        self._problem = problem
        self._admission = admission
        self._machine = machine
        self._policy = policy or Policy()
        self._harness = harness_hash() + switched(self._policy.off)
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
        """Judge a solution; from the store if this harness has measured it here before.

        Raises IsolationError, before any work, when a verdict to be published could not be isolated
        fully and the policy does not say that this is known.
        """
        if effort == "publish" and not self._policy.partial_isolation:
            require_full(self._machine.isolation)
        key = content_key(
            self._harness, self._problem.problem_id, solution.solution_id, effort,
            self._machine.environment, sorted(self._policy.libraries),
        )  # fmt: skip
        found = self._machine.recall("verdicts", key)
        if found is not None:
            return from_json(Verdict, found)
        kills: Counter[VerdictStatus] = Counter()
        while True:
            verdict = with_room(
                lambda: self._measure(solution, effort), _no_room, self._machine.room_pauses_s
            )
            kills[verdict.status] += 1
            if not _killed(verdict) or kills[verdict.status] >= KILL_ATTEMPTS[verdict.status]:
                break
        if verdict.status is not VerdictStatus.REFERENCE_ERROR:
            limited = verdict.status in (VerdictStatus.TIMEOUT, VerdictStatus.OUT_OF_MEMORY)
            self._machine.remember("verdicts", key, to_json(verdict), limited)
        return verdict

    def build(self, solution: Solution) -> Built:
        """As a verdict builds it. Raises BuildError."""
        return self._machine.build(solution, self._policy.libraries, self._inputs_code)

    def _measure(self, solution: Solution, effort: str) -> Verdict:
        record = Draft(
            self._problem, self._admission, solution, effort, self._machine, self._harness
        )
        try:
            self._try(solution, effort, record)
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
        except (KeyError, TypeError) as error:  # a hostile problem can answer in our name
            self.close()
            reason = f"crash: an answer that is not ours: {error!r}"
            return record.refused(VerdictStatus.REFERENCE_ERROR, reason)
        return record.timed()

    def _try(self, solution: Solution, effort: str, record: Draft) -> None:
        """Raises Refusal, BuildError, WorkerError."""
        record.build = self.build(solution)
        self._audit_binary(record)
        publish = effort == "publish"
        with self._bench(solution, record) as (bench, state):
            record.bench = bench
            bench.labels += record.built().labels
            check_solution(bench, effort, state)
            self._time(bench, record, effort)
            if publish:
                if not self._policy.partial_isolation:
                    why = f"nobody could see whose work the calls were: {bench.unwatched}"
                    unmeasured = VerdictStatus.UNMEASURED
                    bench.require(Guard.ATTRIBUTION, not bench.unwatched, why, unmeasured)
                label_solution(bench, state)
            else:
                self._knock_out(bench, state, record)
        if publish:
            self._time_more(solution, record)
            with self._bench(solution, record) as (last, state):
                self._knock_out(last, state, record)

    def _time_more(self, solution: Solution, record: Draft) -> None:
        """Time new processes until there are as many as a published number comes from.

        A few may stand in for those beside which the machine was not quiet.
        """
        spare = SPARE_PROCESSES
        while True:
            if spare and record.watches[-1].unquiet:
                record.watches.pop()
                record.label(PROCESS_REPLACED)
                spare -= 1
            if len(record.watches) == timing.PROCESSES["publish"]:
                return
            with self._bench(solution, record) as (bench, _):
                self._time(bench, record, "publish")

    def _time(self, bench: Bench, record: Draft, effort: str) -> None:
        watch = Stopwatch(bench, self._admission)
        record.watches.append(watch)
        rounds = timing.ROUNDS[effort] // timing.PROCESSES[effort]
        for _ in range(TIMING_ATTEMPTS):
            watch.make_rings()
            watch.measure(rounds, watch_on=effort == "publish")
            watch.check_timed()
            if not watch.doubts:
                return
            bench.labels += [f"timed_again:{doubt.split(':')[0]}" for doubt in watch.doubts]

    @contextlib.contextmanager
    def _bench(self, solution: Solution, record: Draft) -> Iterator[tuple[Bench, Path]]:
        """A bench with both workers ready and the solution loaded; and where its state goes."""
        with self._machine.scratch() as scratch:
            write_files(solution, scratch)
            machine, state_seed = self._machine, fresh_seed()
            reference = self._ready_reference()
            state = scratch / "state.pt"
            given = machine.ask(
                reference,
                "set_state",
                seed=state_seed,
                path=str(state),
                renew_mail=self._renew_mail,
                redraw=Guard.FRESH_PARAMETERS not in self._policy.off,
            )
            self._renew_mail = False
            worker = self._spawn(solution, scratch)
            bench = Bench(
                machine,
                reference,
                worker,
                state_seed,
                off=self._policy.off,
                libraries=self._policy.libraries,
            )
            try:
                record.isolation = from_json(Isolation, machine.open(worker)["isolation"])
                unwatched = machine.ask(worker, "load")["unwatched"]
                if unwatched:
                    bench.leave_unwatched(unwatched)
                libraries = machine.publish(record.built().libraries)
                bench.build_model(libraries, state, given["init_inputs"])
                yield bench, state
            finally:
                machine.end(worker)

    def _spawn(self, solution: Solution, scratch: Path) -> Worker:
        return self._machine.spawn(
            "verification.workers.solution_worker:handlers",
            "solution",
            environment=channels(file.text for file in solution.files),
            scratch=str(scratch),
            form=solution.form,
            precision=str(self._problem.precision),
            inputs_code=self._inputs_code,
            log=str(scratch / "log"),
            mail=self._mail_folder,
            launches=self._machine.launches,
        )

    def _ready_reference(self) -> Worker:
        """The reference's worker, loaded and with its baseline compiled."""
        if self._reference is None:
            machine = self._machine
            folder = self._mail.enter_context(machine.scratch(work=False))
            folder.chmod(0o755)
            self._mail_folder = str(folder)
            self._reference = open_reference(self._problem, machine, self._mail_folder)
            machine.ask(self._reference, "make_example", seed=fresh_seed())
            if not machine.compile(self._reference):
                with machine.lease.exclusive():
                    self._reference.call("first_run", machine.timeout_s)
        return self._reference

    def _audit_binary(self, record: Draft) -> None:
        """What the built libraries ask for. Raises Refusal."""
        if Guard.BINARY_AUDIT in self._policy.off:
            return
        found = record.built().refusals(self._policy.libraries)
        if found:
            raise Refusal(VerdictStatus.INTEGRITY, "; ".join(found)[:500], Guard.BINARY_AUDIT)

    def _knock_out(self, bench: Bench, state: Path, record: Draft) -> None:
        """The same solution built with its kernels dead must be wrong. Raises Refusal.

        Not covered: code that finds out, by a kernel of its own whose result it knows.
        """
        built = record.built()
        record.attribution = _attribution(record)
        if Guard.KNOCK_OUT in self._policy.off or not built.dead:
            return
        seed = fresh_seed()
        draw = {"seed": seed, "distribution": "natural", "state_seed": bench.state_seed}
        try:
            bench.refer("expect", draw=draw)
            arguments = bench.refer("init_inputs")["init_inputs"]
            bench.build_model(self._machine.publish(built.dead), state, arguments)
            got = bench.ask("run", draw=draw)
            right = bench.compared("knock_out", "natural", seed, got)[0].passed
        except Refusal:
            return  # it does not even run
        if right:
            raise Refusal(
                VerdictStatus.INTEGRITY, "it is right without its own kernels", Guard.KNOCK_OUT
            )


def _attribution(record: Draft) -> Attribution:
    """The watched call with the least own work stands for all."""
    seen = record.bench.work if record.bench else []
    least = min(seen, key=lambda work: work.own_share or 0.0, default=None)
    return Attribution(
        knocked_out=record.built().knocked_out,
        own_launches=least.own_launches if least else None,
        own_share=least.own_share if least else None,
        foreign=tuple(sorted(least.foreign)) if least else (),
    )


def open_reference(problem: Problem, machine: Machine, mail: str = "") -> Worker:
    """A reference worker with its problem loaded. Raises WorkerError.

    `mail`: the folder through which it gets the outputs it is to check.
    """
    worker = machine.spawn(
        "verification.workers.reference_worker:handlers",
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


def _killed(verdict: Verdict) -> bool:
    """Whether a worker was killed by SIGKILL, which we did not send: somebody else's doing, such as
    the system's when memory is short. One that kills itself is measured again too, and again."""
    died = verdict.status in (VerdictStatus.CRASH, VerdictStatus.REFERENCE_ERROR)
    return died and "killed by SIGKILL" in verdict.reason


def _no_room(verdict: Verdict) -> bool:
    """On either side."""
    ours = verdict.status is VerdictStatus.REFERENCE_ERROR
    theirs = verdict.status is VerdictStatus.OUT_OF_MEMORY
    full = theirs or (ours and verdict.reason.startswith(f"{WorkerOutOfMemory.kind}:"))
    return full and was_full(verdict.reason)
