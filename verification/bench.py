"""The bench: one solution's worker beside the reference's, and how the judge talks to both.

Everything that goes wrong in the solution's worker is the solution's fault and raised as a
`Refusal`; a fault of the reference's side passes through as a WorkerError.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from runtime.sandbox import Worker, WorkerError
from schemas.records import Check, Target, VerdictStatus
from verification import own_work
from verification.building.binary import TORCH
from verification.guards import Guard
from verification.machine import Machine
from verification.sampling import Sampler

SPIN_S = 0.02
TORCH_DID_PART = "torch_did_part"
"""Label: under a policy that allows it, operators of torch did part of the work."""
UNWATCHED = "calls_unwatched"
"""Label: nobody saw whose work the calls were. On a GPU such a verdict is not published."""
PARAMETERS_RENAMED = "parameters_renamed"
"""Label: parameters have names of the solution's own, and went by what both constructors drew."""


class Refusal(Exception):
    """Why a solution is refused; `guard` when it fell to one."""

    def __init__(self, status: VerdictStatus, reason: str, guard: Guard | None = None) -> None:
        super().__init__(f"{guard}: {reason}" if guard is not None else reason)
        self.status = status
        self.reason = str(self)


def fresh_seed() -> int:
    """Drawn from the operating system after the solution is frozen; logged in the verdict."""
    return secrets.randbits(31)


class Bench:
    """Two workers, the guards that are on, and the comparisons made so far.

    Every call shares the device with others, except inside `alone`.
    """

    def __init__(
        self,
        machine: Machine,
        reference: Worker,
        solution: Worker,
        state_seed: int,
        off: Collection[Guard] = frozenset(),
        libraries: Collection[str] = frozenset(),
    ) -> None:
        self.machine = machine
        self.state_seed = state_seed
        self.checks: list[Check] = []
        self.labels: list[str] = []
        self.work: list[own_work.Work] = []
        """Whose work the watched calls were."""
        self.unwatched = ""
        """On a GPU, why nobody can see whose work the calls are."""
        self._libraries = frozenset(libraries)
        self._loaded: tuple[str, ...] = ()
        """Paths of the built libraries that the solution's process was last told to load."""
        self._reference = reference
        self._solution = solution
        self._off = frozenset(off)
        self._held = False

    def on(self, guard: Guard) -> bool:
        return guard not in self._off

    @property
    def torch_allowed(self) -> bool:
        """Whether operators of torch may do part of the work."""
        return TORCH in self._libraries

    def require(
        self,
        guard: Guard,
        held: object,
        reason: str,
        status: VerdictStatus = VerdictStatus.INTEGRITY,
    ) -> None:
        """Refuse unless `held`, or the guard is off. Raises Refusal."""
        if not held and self.on(guard):
            raise Refusal(status, reason, guard)

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Call the solution's worker. Raises Refusal."""
        if "libraries" in params:
            self._loaded = tuple(params["libraries"].values())
        with _blaming_solution(method):
            reply = self._call(self._solution, method, **params)
        return _answer(method, reply)

    def build_model(self, libraries: dict[str, str], state: Path, init_inputs: list[Any]) -> None:
        """Have the solution construct its model and take over the parameters in `state`.

        Where it has other names for them, both sides construct from one seed, and what comes out
        equal is the same: so KernelBench gives both the same parameters. Raises Refusal.
        """
        given = {"state": str(state), "init_inputs": init_inputs}
        if self.ask("build_model", libraries=libraries, **given).get("other_names"):
            seed, constructed = fresh_seed(), str(state.with_name("constructed.pt"))
            self.refer("constructed_state", seed=seed, path=constructed)
            self.ask("match_names", seed=seed, constructed=constructed, **given)
            self.labels.append(PARAMETERS_RENAMED)

    def refer(self, method: str, **params: Any) -> Any:
        """Call the reference's worker. Raises WorkerError."""
        return self._call(self._reference, method, **params)

    def _call(self, worker: Worker, method: str, **params: Any) -> Any:
        if self._held:
            # On a CPU whoever spins takes a core from what is timed.
            spin_s = SPIN_S if self.machine.target is Target.CUDA else 0.0
            return worker.call(method, self.machine.timeout_s, spin_s, **params)
        return self.machine.ask(worker, method, **params)

    def both(
        self, referred: tuple[str, dict[str, Any]], asked: tuple[str, dict[str, Any]]
    ) -> tuple[Any, Any]:
        """Call both workers; on a GPU at once, which is what lets a timing begin sooner."""
        if self.machine.target is Target.CPU:  # both would want all cores
            return self.refer(referred[0], **referred[1]), self.ask(asked[0], **asked[1])
        timeout_s = self.machine.timeout_s
        with self.machine.lease.shared():
            with _blaming_solution(asked[0]):
                self._solution.send(asked[0], **asked[1])
            try:
                wanted = self._reference.call(referred[0], timeout_s, **referred[1])
            except WorkerError:
                self._solution.close()  # it must not compute on beside somebody's timing
                raise
            with _blaming_solution(asked[0]):
                reply = self._solution.receive(timeout_s)
        return wanted, _answer(asked[0], reply)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """The device to ourselves."""
        with self.machine.lease.exclusive():
            self._held = True
            try:
                yield
            finally:
                self._held = False

    @contextlib.contextmanager
    def solution_stopped(self) -> Iterator[None]:
        """On a CPU the solution's process stands still while a baseline is timed.

        Not on a GPU, where a kernel runs on without its process: BASELINE_DRIFT is for that.
        """
        if self.machine.target is not Target.CPU:
            yield
            return
        self._signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._solution.pid, number)

    def attribute(self, reply: dict[str, Any]) -> None:
        """Whose work a watched call was; nothing is concluded where nothing could be seen.

        Raises Refusal.
        """
        account = reply.get("launches")
        if account is None:
            return
        try:
            work = own_work.of_launches(account, self._libraries)
        except (KeyError, TypeError, ValueError) as error:
            raise Refusal(VerdictStatus.INTEGRITY, f"no account of launches: {error}") from error
        self._settle(work, own_work.MAX_FOREIGN_SHARE)

    def leave_unwatched(self, why: str) -> None:
        """Have the verdict say that nobody saw whose work the calls were."""
        self.unwatched = why
        self.labels.append(UNWATCHED)

    def sampler(self) -> Sampler:
        """Samples the solution's process from outside; for a CPU."""
        return Sampler(self._solution.pid)

    def sampled(self, samples: Mapping[str, int]) -> own_work.Work | None:
        """Whose work the sampled calls were; None while there are too few samples to tell."""
        return own_work.of_samples(samples, self._loaded)

    def attribute_samples(self, samples: Mapping[str, int]) -> None:
        """Judge whose work the sampled calls were. Raises Refusal."""
        work = self.sampled(samples)
        if work is not None:
            self._settle(work, own_work.MAX_SAMPLED_SHARE)

    def _settle(self, work: own_work.Work, most: float) -> None:
        self.work.append(work)
        why = own_work.objection(work, most)
        if why is not None and self.torch_allowed and work.own_launches != 0:
            self.labels.append(TORCH_DID_PART)
            return
        self.require(Guard.ATTRIBUTION, why is None, str(why))

    def compare(
        self,
        name: str,
        distribution: str,
        seed: int,
        got: dict[str, Any],
        guard: Guard | None = None,
    ) -> None:
        """Compare handed-over outputs with the reference's last expectation. Raises Refusal.

        `guard`: what this comparison is there for; else it is named by what it fell to.
        """
        check, fell_to = self.compared(name, distribution, seed, got)
        if check.passed:
            self.checks.append(check)
            return
        reason = f"{name} {distribution}: {check.detail}"
        self.checks.append(check)
        raise Refusal(VerdictStatus.INCORRECT, reason, guard or fell_to)

    def compared(
        self, name: str, distribution: str, seed: int, got: dict[str, Any], again: bool = False
    ) -> tuple[Check, Guard]:
        """The same without consequences."""
        outputs = got.get("outputs")
        if not isinstance(outputs, list):
            raise Refusal(VerdictStatus.INTEGRITY, "no outputs were handed over", Guard.STRUCTURE)
        found = self.refer(
            "check",
            structure=got.get("structure"),
            outputs=outputs,
            off=sorted(self._off),
            again=again,
        )
        fell_to = Guard(found.pop("guard", Guard.BUDGET))
        return Check(name=name, distribution=distribution, seed=seed, **found), fell_to


@contextlib.contextmanager
def _blaming_solution(method: str) -> Iterator[None]:
    try:
        yield
    except WorkerError as error:
        raise Refusal(VerdictStatus(error.kind), f"{method}: {error}") from error


def _answer(method: str, reply: Any) -> dict[str, Any]:
    if not isinstance(reply, dict):
        raise Refusal(VerdictStatus.INTEGRITY, f"{method}: not an answer: {reply!r:.200}")
    return reply
