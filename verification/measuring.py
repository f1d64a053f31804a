"""Timing one solution: interleaved with the baselines, alone on the device, outputs checked.

Three clocks are read. The finest is in the solution's process (CUDA events); it is believed as
far as the judge's own clock, around the same calls and around `bare` ones, bears it out. CUPTI's
account of an unannounced call is the third, where there is CUPTI (`workers/attribution.py`).

What the solution's process could do about time, and what is for it:

    claim less          JUDGE_CLOCK: the judge's clock around every call
    leave out the flush or what else of ours surrounds a call: of `bare` calls there is nothing to
                        leave out. Warm caches alone save what fits into them over the memory's
                        rate, 0.013 ms on an H200; the call that CUPTI watches comes after a
                        flush by the reference's process, whose caches are the same ones
    compute when asked  OUTPUT_READY: copying an output after the clock costs what copying costs
    skip some calls     TIMED_OUTPUTS: which call's output is checked is drawn after it returned
    slow the baselines  on a CPU it is stopped meanwhile; on a GPU BASELINE_DRIFT

Whose work the calls are is watched in one secret round: on a GPU in a call of its own, on a CPU by
samples of the timed calls themselves, taken from outside (ATTRIBUTION).
"""

from __future__ import annotations

import secrets
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from schemas.records import Admission, Target
from verification import device_state, timing
from verification.bench import UNWATCHED, Bench, fresh_seed
from verification.calibration import Surroundings, calibrate, milliseconds, timed
from verification.guards import Guard
from verification.sampling import Sampler

BARE_A_ROUND = 2
"""Of a solution; with half as many, 3 honest solutions of 100 were charged 0.08 to 0.09 ms on an
H200."""
KEPT_CALLS = 3
"""Calls whose outputs are checked: cheating on every second call escapes one time in eight."""
MORE_SAMPLED_CALLS = 12
"""Calls beside the timed ones of a round that may be sampled until there are samples enough. Calls
so short that these do not suffice have too much of torch's own overhead in them to tell."""
EARLY_ROUNDS = 3
SLOW = 4.0
"""Times eager, beyond which a solution is called once a round."""
HOPELESS = 0.5
"""Below this speedup over both baselines after EARLY_ROUNDS, watching on changes nothing."""


class Stopwatch:
    """The times of one solution's process, complete when `measure` returns."""

    def __init__(self, bench: Bench, admission: Admission) -> None:
        self._bench = bench
        self._admission = admission
        self.rounds: dict[str, list[list[float]]] = {}
        self.clock = ""
        self.cut_short = False
        self.states: list[device_state.Sample] = []
        self.discarded = 0
        """Rounds that were thrown away because the device was throttled."""
        self.doubts: list[str] = []
        """Why these times are not to be believed, each beginning with its guard."""
        self._kept: list[int] = []
        self._keep_ms: list[float] = []
        self._around: list[float] = []
        """By the judge's clock, what surrounded the timed calls."""
        self._bare: list[float] = []
        self._samples: dict[str, int] = {}
        """Of the sampled calls, by file; on a CPU."""
        self._busy_ms: float | None = None
        """How long CUPTI saw the device busy with one call."""
        self._count = 0
        self._ring_seed = 0
        self._usual = Surroundings()

    @property
    def unquiet(self) -> bool:
        """Whether all there is to doubt is what the solution has no hand in. It could slow the
        baselines, so drift is not among it."""
        of_machine = (Guard.AA_CONTROL, Guard.DEVICE_STATE)
        return bool(self.doubts) and all(doubt.startswith(of_machine) for doubt in self.doubts)

    @property
    def _target(self) -> str:
        return str(self._bench.machine.target)

    def make_rings(self) -> None:
        """The inputs of the timed calls and warm caches, on both sides; nothing is timed yet."""
        self._ring_seed = fresh_seed()
        self._bench.refer("make_ring", seed=fresh_seed())
        self._bench.ask("make_ring", seed=self._ring_seed)
        warm, also = self._bench.both(("warm_up", {}), ("warm_up", {"rooms": KEPT_CALLS}))
        # A false count only makes the reference replay other inputs, and the solution fail.
        self._kept, self._keep_ms, self.doubts = [], [], []
        self._around, self._bare = [], []
        self._samples = {}
        self._count, self.clock = int(also["calls"]), warm["clock"]

    def measure(self, rounds: int, watch_on: bool) -> None:
        """Time all sides, interleaved, with the device to ourselves. Raises Refusal.

        `watch_on`: do not stop early, however hopeless it looks.
        """
        with self._bench.alone():
            self._usual = calibrate(self._bench)
            self._rounds(rounds, watch_on)
        self._bench.refer("stop_timing")
        self._charge()
        self._doubt()

    def _rounds(self, total: int, watch_on: bool) -> None:
        bench = self._bench
        calls = timing.calls_per_round(self._usual.eager_ms, self._target)
        # Secret rounds in which one call's output is checked; one of them is sure to be early.
        keep = {secrets.randbelow(min(EARLY_ROUNDS, total))}
        others = [index for index in range(total) if index not in keep]
        keep |= set(secrets.SystemRandom().sample(others, min(KEPT_CALLS - 1, len(others))))
        watched = secrets.randbelow(min(EARLY_ROUNDS, total))

        def baseline(side: str) -> list[float]:
            with bench.solution_stopped():
                return list(bench.refer("time", side=side, calls=calls))

        sides: dict[str, Callable[[], list[float]]] = {
            "eager": lambda: baseline("eager"),
            "compile": lambda: baseline("compile"),
            "control": lambda: baseline("compile"),
            "solution": lambda: self._time_solution(
                calls, len(self.rounds["solution"]) in keep, len(self.rounds["solution"]) == watched
            ),
        }
        self.rounds, self.states, self.discarded = {side: [] for side in sides}, [], 0
        index = 0
        while index < total:
            for side in timing.order(list(sides), index):
                self.rounds[side].append(sides[side]())
            if self._throttled():
                for found in self.rounds.values():
                    found.pop()
                if device_state.too_many(self.discarded, total):
                    break
                continue
            index += 1
            self.cut_short = not watch_on and index >= EARLY_ROUNDS and self._hopeless()
            if self.cut_short:
                break

    def _throttled(self) -> bool:
        """Look at the device after a round; whether the round is to be thrown away for it."""
        state = self._bench.machine.device_watch.sample()
        if state is None:
            return False
        self.states.append(state)
        thrown = state.throttled and self._bench.on(Guard.DEVICE_STATE)
        self.discarded += thrown
        return thrown

    def _time_solution(self, calls: int, keep: bool, watched: bool = False) -> list[float]:
        """One round of the solution. A slow one is called once a round, which is only noisier.

        `keep`: have the output of one of the timed calls copied, which one is drawn here.
        `watched`: on a GPU have one more call whose kernels are attributed, on a CPU sample these.
        """
        sampler = None
        if watched and self._bench.machine.target is Target.CUDA:
            self._watch()
        elif watched:
            sampler = self._bench.sampler()
        _, untimed = self._call_solution()
        inside: list[float] = []
        outside: list[float] = []
        kept_call, slow = secrets.randbelow(calls), False
        for index in range(calls):
            number = self._count
            one, other = self._call_solution(sampler=sampler)
            inside.append(one)
            outside.append(other)
            # By the fastest call so far: one interruption does not make a solution slow.
            slow = min(untimed, *outside) > SLOW * self._usual.eager_ms
            if keep and (slow or index == kept_call):
                self._keep(number)
            if slow:
                break
            if keep and index == kept_call:
                self._call_solution()  # untimed: a copy is no usual neighbour
        if sampler is not None:
            self._finish(sampler, slow)
        self._around += [other - one for one, other in zip(inside, outside, strict=True)]
        if self._bench.machine.target is Target.CUDA:
            self._bare += [self._call_solution(bare=True)[1] for _ in range(BARE_A_ROUND)]
        return inside

    def _finish(self, sampler: Sampler, slow: bool) -> None:
        """Sample more calls, untimed, until there is enough to tell; of a slow solution none."""
        for left in range(MORE_SAMPLED_CALLS, -1, -1):
            report = sampler.report()
            if report is None:
                self._bench.labels.append(UNWATCHED)  # the kernel allows no sampling
                return
            self._samples = report
            if slow or not left or self._bench.sampled(report) is not None:
                return
            self._call_solution(sampler=sampler)

    def _watch(self) -> None:
        """One call of which CUPTI says whose kernels ran, and from when to when."""
        self._bench.ask("prepare")
        self._bench.refer("flush")
        reply = self._bench.ask("watch")
        self._count += 1
        self._bench.attribute(reply)
        account = reply.get("launches")
        if account is None:
            return
        self._busy_ms = float(account["busy_ms"])

    def _charge(self) -> None:
        """Where the judge's clock says more than the solution's, by more than what surrounds a call
        explains, it is right.

        Two kinds of calls are asked. One process leaves out what surrounds its timed calls, and so
        claims too little; of a bare call there is nothing to leave out.
        """
        if not self._bench.on(Guard.JUDGE_CLOCK) or not self.rounds["solution"]:
            return
        claimed_ms = statistics.median(map(statistics.median, self.rounds["solution"]))
        seen_ms = claimed_ms + statistics.median(self._around) - self._usual.around_ms
        more_ms = timing.unclaimed_ms(
            seen_ms, claimed_ms, timing.CALL_SLACK_MS[self._target], timing.CALL_SHARE
        )
        if self._bare:
            bare_ms = statistics.median(self._bare) - self._usual.launch_ms
            more_ms = max(
                more_ms,
                timing.unclaimed_ms(bare_ms, claimed_ms, timing.BARE_SLACK_MS, timing.BARE_SHARE),
            )
        if more_ms > 0.0:
            self.rounds["solution"] = [[s + more_ms for s in r] for r in self.rounds["solution"]]

    def _keep(self, number: int) -> None:
        _, outside_ms = timed(lambda: self._bench.ask("keep", number=number))
        self._keep_ms.append(outside_ms)
        self._kept.append(number)

    def _call_solution(
        self, bare: bool = False, sampler: Sampler | None = None
    ) -> tuple[float, float]:
        """One call with fresh inputs: (its own clock, the judge's clock) in ms.

        No other process uses the device in between: handing it over from one to another takes 0.13
        to 0.45 ms of the judge's clock, and of nothing else.
        """
        sampled: AbstractContextManager[Any] = sampler or nullcontext()
        self._bench.ask("prepare")
        with sampled:
            reply, outside_ms = timed(lambda: self._bench.ask("call", bare=bare))
        self._count += 1
        return milliseconds(reply), outside_ms

    def _hopeless(self) -> bool:
        best = max(
            timing.speedup(self.rounds[side], self.rounds["solution"]).high
            for side in ("eager", "compile")
        )
        return best < HOPELESS

    def _doubt(self) -> None:
        """Find reasons not to believe these times."""
        if device_state.too_many(self.discarded, len(self.rounds["solution"]) + self.discarded):
            self.doubts.append(
                f"{Guard.DEVICE_STATE}: the device was throttled in {self.discarded} rounds"
            )
            return
        solution_ms = statistics.median(map(statistics.median, self.rounds["solution"]))
        slack_ms = max(timing.READY_SLACK_MS[self._target], timing.READY_SHARE * solution_ms)
        waited_ms = min(self._keep_ms) - self._usual.copy_ms
        if waited_ms > slack_ms:
            self._suspect(
                Guard.OUTPUT_READY,
                f"reading an output took {waited_ms:.3f} ms longer than copying it takes",
            )
        if not self.cut_short:
            control = timing.speedup(self.rounds["compile"], self.rounds["control"])
            tolerance = timing.AA_TOLERANCE[self._target]
            if abs(control.point - 1.0) > tolerance:
                self._suspect(
                    Guard.AA_CONTROL,
                    f"the A/A control is {control.point:.3f}, expected 1 within {tolerance}",
                )
        self._busy(solution_ms)
        for side, before in (
            ("eager", self._admission.eager_ms),
            ("compile", self._admission.compile_ms),
        ):
            now = statistics.median(map(statistics.median, self.rounds[side]))
            drift = timing.DRIFT[self._target]
            if before is not None and now > drift * before + timing.DRIFT_SLACK_MS:
                self._suspect(
                    Guard.BASELINE_DRIFT,
                    f"{side} takes {now:.3f} ms beside it and {before:.3f} ms alone",
                )

    def _busy(self, claimed_ms: float) -> None:
        if self._busy_ms is None:
            return
        slack_ms = max(timing.BUSY_SLACK_MS, timing.BUSY_SHARE * self._busy_ms)
        if claimed_ms < self._busy_ms - slack_ms:
            self._suspect(
                Guard.CLOCKS_AGREE,
                f"CUPTI saw the device busy for {self._busy_ms:.4f} ms in a call, "
                f"claimed are {claimed_ms:.4f} ms",
            )

    def _suspect(self, guard: Guard, why: str) -> None:
        if self._bench.on(guard):
            self.doubts.append(f"{guard}: {why}")

    def check_timed(self) -> None:
        """Compare the outputs of the timed calls that were kept, then look at whose work the
        sampled ones were. Raises Refusal."""
        if not self._kept:
            raise RuntimeError("no output of a timed call was kept")
        for number in self._kept:
            self._bench.refer("expect_timed", ring_seed=self._ring_seed, count=number)
            got = self._bench.ask("hand_over", number=number)
            if self._bench.on(Guard.TIMED_OUTPUTS):
                self._bench.compare(
                    "timed", f"call {number}", self._ring_seed, got, Guard.TIMED_OUTPUTS
                )
        self._bench.attribute_samples(self._samples)
