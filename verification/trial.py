"""One solution on the bench: five checked draws, then interleaved timing with checked outputs.

`Trial` talks to two workers, the reference's and the solution's, and decides by what the first
computes, what the second hands over and what its own clock says. Everything it raises about the
solution is a `Refusal`; a fault of the reference's side passes through as a WorkerError.
"""

from __future__ import annotations

import contextlib
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from runtime.sandbox import Worker, WorkerError
from schemas.records import Check, Target, VerdictStatus
from verification import timing
from verification.inputs import DRAWS
from verification.machine import Machine

PINGS = 8
KEPT_CALLS = 2
EARLY_ROUNDS = 3
SLOW = 4.0
"""Times eager, beyond which a solution is called once a round."""
HOPELESS = 0.5
"""Below this speedup over both baselines after EARLY_ROUNDS, watching on changes nothing."""


class Refusal(Exception):
    """Why a solution is refused."""

    def __init__(self, status: VerdictStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


def fresh_seed() -> int:
    """Drawn from the operating system after the solution is frozen; logged in the verdict."""
    return secrets.randbits(31)


class Trial:
    """The checks and times of one solution, complete when a phase returns.

    Every call shares the device with others, except in `measure`, which has it alone.
    """

    def __init__(
        self, machine: Machine, reference: Worker, solution: Worker, state_seed: int
    ) -> None:
        self._machine = machine
        self._reference = reference
        self._solution = solution
        self._held = False  # whether we have the device alone
        self._state_seed = state_seed
        self.checks: list[Check] = []
        self.rounds: dict[str, list[list[float]]] = {}
        self.clock = ""
        self._kept: list[int] = []
        self._count = 0
        self._ring_seed = 0
        self._eager_ms = 0.0
        self._ping_ms = 0.0
        self.cut_short = False

    def _ask(self, method: str, **params: Any) -> Any:
        """Call the solution's worker; whatever goes wrong there is the solution's fault."""
        with _blaming_solution(method):
            reply = self._call(self._solution, method, **params)
        return _answer(method, reply)

    def _refer(self, method: str, **params: Any) -> Any:
        return self._call(self._reference, method, **params)

    def _call(self, worker: Worker, method: str, **params: Any) -> Any:
        if self._held:
            return worker.call(method, self._machine.timeout_s, **params)
        return self._machine.ask(worker, method, **params)

    def _both(self, referred: str, asked: str, **params: Any) -> tuple[Any, Any]:
        """Call both workers; on a GPU at once, which is what lets a timing begin sooner."""
        if self._machine.target is Target.CPU:  # both would want all cores
            return self._refer(referred, **params), self._ask(asked, **params)
        timeout_s = self._machine.timeout_s
        with self._machine.lease.shared():
            with _blaming_solution(asked):
                self._solution.send(asked, **params)
            try:
                wanted = self._reference.call(referred, timeout_s, **params)
            except WorkerError:
                self._solution.close()  # it must not compute on beside somebody's timing
                raise
            with _blaming_solution(asked):
                reply = self._solution.receive(timeout_s)
        return wanted, _answer(asked, reply)

    def calibrate(self) -> None:
        """What a call costs beside its work on the judge's clock, with the device to ourselves.

        The smaller answer of the two processes counts: a solution could slow its own, and more
        would be kinder to it.
        """
        medians = []
        for ping in (self._refer, self._ask):
            costs = []
            for _ in range(PINGS):
                started = time.perf_counter()
                inside_ms = _milliseconds(ping("ping"))
                costs.append((time.perf_counter() - started) * 1e3 - inside_ms)
            medians.append(statistics.median(costs))
        self._ping_ms = min(medians)

    def load(self, library: str, state: str, init_inputs: list[Any]) -> None:
        self._ask("build_model", library=library, state=state, init_inputs=init_inputs)

    def check_draws(self) -> None:
        """Five draws; stops at the first wrong one. Raises Refusal."""
        for distribution in DRAWS:
            seed = fresh_seed()
            draw = {"seed": seed, "distribution": distribution, "state_seed": self._state_seed}
            wanted, got = self._both("expect", "run", draw=draw)
            if got.get("checksum") != wanted["checksum"]:
                raise Refusal(VerdictStatus.INTEGRITY, "the solution ran on other inputs")
            if not got.get("inputs_kept"):
                raise Refusal(VerdictStatus.INTEGRITY, "the solution changed its inputs")
            if got.get("aliases") and not self._refer("aliases")["aliases"]:
                raise Refusal(VerdictStatus.INTEGRITY, "an output shares memory with an input")
            self._judge("draw", distribution, seed, got)
        if not self._ask("alive").get("kept"):
            raise Refusal(VerdictStatus.INTEGRITY, "a later call changed an earlier output")

    def _judge(self, name: str, distribution: str, seed: int, got: dict[str, Any]) -> None:
        """Compare handed-over outputs with the reference's last expectation."""
        outputs = got.get("outputs")
        if not isinstance(outputs, list):
            raise Refusal(VerdictStatus.INTEGRITY, "no outputs were handed over")
        found = self._refer("check", structure=got.get("structure"), outputs=outputs)
        check = Check(name=name, distribution=distribution, seed=seed, **found)
        self.checks.append(check)
        if not check.passed:
            raise Refusal(VerdictStatus.INCORRECT, f"{name} {distribution}: {check.detail}")

    def make_rings(self) -> None:
        """The inputs of the timed calls and warm caches, on both sides; nothing is timed yet."""
        self._ring_seed = fresh_seed()
        self._refer("make_ring", seed=fresh_seed())
        self._ask("make_ring", seed=self._ring_seed)
        warm, also_warm = self._both("warm_up", "warm_up")
        # A false count only makes the reference replay other inputs, and the solution fail.
        self._kept, self._count, self.clock = [], int(also_warm["calls"]), warm["clock"]

    def measure(self, effort: str) -> None:
        """Time all sides, interleaved, with the device to ourselves. Raises Refusal."""
        with self._machine.lease.exclusive():
            self._held = True
            try:
                self._measure(effort)
            finally:
                self._held = False
        self._refer("stop_timing")

    def _measure(self, effort: str) -> None:
        self.calibrate()
        self._eager_ms = statistics.median(self._refer("time", side="eager", calls=3))
        calls = timing.calls_per_round(self._eager_ms, str(self._machine.target))
        total = timing.ROUNDS[effort]
        # Secret rounds in which one call's output is checked; one of them is sure to be early.
        keep = {secrets.randbelow(EARLY_ROUNDS)}
        keep |= {secrets.randbelow(total) for _ in range(KEPT_CALLS - 1)}
        sides: dict[str, Callable[[], list[float]]] = {
            "eager": lambda: self._refer("time", side="eager", calls=calls),
            "compile": lambda: self._refer("time", side="compile", calls=calls),
            "control": lambda: self._refer("time", side="compile", calls=calls),
            "solution": lambda: self._time_solution(calls, len(self.rounds["solution"]) in keep),
        }
        self.rounds = {side: [] for side in sides}
        for index in range(total):
            for side in timing.order(list(sides), index):
                self.rounds[side].append(sides[side]())
            self.cut_short = effort != "publish" and index + 1 >= EARLY_ROUNDS and self._hopeless()
            if self.cut_short:
                break

    def _time_solution(self, calls: int, keep: bool) -> list[float]:
        """One round of the solution. A slow one is called once a round, which is only noisier.

        `keep`: have the output of one of the timed calls copied, which one is drawn here.
        """
        _, untimed = self._call_solution()
        inside: list[float] = []
        outside: list[float] = []
        kept_call = secrets.randbelow(calls)
        for index in range(calls):
            number = self._count
            one, other = self._call_solution()
            inside.append(one)
            outside.append(other)
            # By the fastest call so far: one interruption does not make a solution slow.
            slow = min(untimed, *outside) > SLOW * self._eager_ms
            if keep and (slow or index == kept_call):
                self._ask("keep", number=number)
                self._kept.append(number)
            if slow:
                break
            if keep and index == kept_call:
                self._call_solution()  # untimed: the copy has the memory that it must ask for anew
        return timing.believable(inside, outside, self._ping_ms)

    def _call_solution(self) -> tuple[float, float]:
        """One call with fresh inputs and cold caches: (its own clock, the judge's clock) in ms."""
        self._ask("prepare")
        self._count += 1
        started = time.perf_counter()
        reply = self._ask("call")
        return _milliseconds(reply), (time.perf_counter() - started) * 1e3

    def _hopeless(self) -> bool:
        best = max(
            timing.speedup(self.rounds[side], self.rounds["solution"]).high
            for side in ("eager", "compile")
        )
        return best < HOPELESS

    def check_timed(self) -> None:
        """Compare the outputs of the timed calls that were kept. Raises Refusal."""
        if not self._kept:
            raise RuntimeError("no output of a timed call was kept")
        for number in self._kept:
            self._refer("expect_timed", ring_seed=self._ring_seed, count=number)
            got = self._ask("hand_over", number=number)
            self._judge("timed", f"call {number}", self._ring_seed, got)


@contextlib.contextmanager
def _blaming_solution(method: str) -> Iterator[None]:
    """Whatever goes wrong in its worker is the solution's fault."""
    try:
        yield
    except WorkerError as error:
        raise Refusal(VerdictStatus(error.kind), f"{method}: {error}") from error


def _answer(method: str, reply: Any) -> dict[str, Any]:
    if not isinstance(reply, dict):
        raise Refusal(VerdictStatus.INTEGRITY, f"{method}: not an answer: {reply!r:.200}")
    return reply


def _milliseconds(reply: Any) -> float:
    """The solution's own time. Raises Refusal when it is no positive number."""
    value = reply.get("ms") if isinstance(reply, dict) else None
    if not isinstance(value, float | int) or not 0.0 < float(value) < 1e9:
        raise Refusal(VerdictStatus.INTEGRITY, f"not a time: {value!r}")
    return float(value)
