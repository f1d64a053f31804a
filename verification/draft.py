"""A verdict being written: what is known so far, and the record it becomes."""

from __future__ import annotations

from typing import Any

from schemas.records import (
    Admission,
    Attribution,
    DeviceState,
    Isolation,
    Problem,
    Solution,
    Verdict,
    VerdictStatus,
)
from verification import timing
from verification.bench import Bench
from verification.building.built import Built
from verification.device_state import summary
from verification.guards import Guard
from verification.machine import Machine
from verification.measuring import Stopwatch

FLOOR_SHARE = 0.8
"""Of the roofline, which is at the copy rate: reading alone can be an eighth faster."""
FLOOR_BYTES = 256 << 20
"""Problems that move less may sit in a cache, where the copy rate of the memory is no floor."""


class Draft:
    """A verdict being written."""

    def __init__(
        self,
        problem: Problem,
        admission: Admission,
        solution: Solution,
        effort: str,
        machine: Machine,
        harness: str,
    ) -> None:
        self._common: dict[str, Any] = {
            "problem_id": problem.problem_id,
            "solution_id": solution.solution_id,
            "effort": effort,
            "roofline_ms": admission.roofline_ms,
            "headroom": admission.headroom,
            "environment": machine.environment,
            "harness": harness,
        }
        self._admission = admission
        self.build: Built | None = None
        self.bench: Bench | None = None
        """Of the process that was checked."""
        self.watches: list[Stopwatch] = []
        """One of each process that was timed."""
        self.isolation: Isolation | None = None
        self.attribution: Attribution | None = None

    def _verdict(self, status: VerdictStatus, reason: str, **measured: Any) -> Verdict:
        nothing = dict.fromkeys(
            ("solution", "eager", "compile", "speedup_eager", "speedup_compile", "aa_control")
        )
        return Verdict(
            status=status,
            reason=reason,
            checks=tuple(self.bench.checks) if self.bench else (),
            labels=tuple(dict.fromkeys(self.bench.labels)) if self.bench else (),
            isolation=self.isolation,
            build_s=self.build.build_s if self.build else None,
            binary_hash=self.build.binary_hash if self.build else None,
            processes=len(self.watches) or None,
            attribution=self.attribution,
            device_state=self._device_state(),
            **self._common,
            **{**nothing, **measured},
        )

    def _device_state(self) -> DeviceState | None:
        samples = [sample for watch in self.watches for sample in watch.states]
        return summary(samples, sum(watch.discarded for watch in self.watches))

    def built(self) -> Built:
        if self.build is None:
            raise RuntimeError("nothing was built")
        return self.build

    def label(self, name: str) -> None:
        if self.bench is not None:
            self.bench.labels.append(name)

    def refused(self, status: VerdictStatus, reason: str) -> Verdict:
        return self._verdict(status, reason)

    def timed(self) -> Verdict:
        """The verdict when every check passed: CORRECT with speedups, or UNMEASURED and why."""
        rounds = {
            side: [r for watch in self.watches for r in watch.rounds[side]]
            for side in ("eager", "compile", "control", "solution")
        }
        doubts = [doubt for watch in self.watches for doubt in watch.doubts]
        if not rounds["solution"]:
            return self._verdict(VerdictStatus.UNMEASURED, (doubts or ["no valid sample"])[0])
        measured: dict[str, Any] = {
            side: timing.measurement(rounds[side], self.watches[0].clock)
            for side in ("eager", "compile", "solution")
        }
        measured["aa_control"] = timing.speedup(rounds["compile"], rounds["control"])
        if self._below_floor(measured["solution"].median_ms):
            doubts.append(
                f"{Guard.PHYSICS_FLOOR}: {measured['solution'].median_ms:.4f} ms is below "
                f"{FLOOR_SHARE:g} of the roofline"
            )
        if doubts:
            return self._verdict(VerdictStatus.UNMEASURED, doubts[0], **measured)
        for side in ("eager", "compile"):
            measured[f"speedup_{side}"] = timing.speedup(rounds[side], rounds["solution"])
        return self._verdict(VerdictStatus.CORRECT, "", **measured)

    def _below_floor(self, median_ms: float) -> bool:
        floor, moved = self._admission.roofline_ms, self._admission.min_bytes
        on = self.bench is None or self.bench.on(Guard.PHYSICS_FLOOR)
        if not on or floor is None or moved is None:
            return False
        return moved >= FLOOR_BYTES and median_ms < FLOOR_SHARE * floor
