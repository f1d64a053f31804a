"""Who is to blame when one of two workers fails, and that on a GPU both work at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from runtime.sandbox import WorkerCrash, WorkerError
from schemas.records import Target, VerdictStatus
from verification.trial import Refusal, Trial

EVENTS: list[str] = []


class Side:
    """A worker that answers, or fails, and says when it was asked."""

    def __init__(self, name: str, reply: Any) -> None:
        self.name, self.reply = name, reply

    def send(self, method: str, **params: Any) -> None:
        EVENTS.append(f"{self.name} gets {method}")

    def receive(self, timeout_s: float) -> Any:
        EVENTS.append(f"{self.name} answers")
        if isinstance(self.reply, Exception):
            raise self.reply
        return self.reply

    def close(self) -> None:
        EVENTS.append(f"{self.name} is ended")

    def call(self, method: str, timeout_s: float, **params: Any) -> Any:
        self.send(method, **params)
        return self.receive(timeout_s)


class Machine:
    timeout_s = 1.0

    def __init__(self, target: Target) -> None:
        self.target, self.lease = target, SimpleNamespace(shared=self.shared)

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        EVENTS.append("in")
        yield
        EVENTS.append("out")

    def ask(self, worker: Side, method: str, **params: Any) -> Any:
        with self.shared():
            return worker.call(method, self.timeout_s, **params)


def both(target: Target, reference: Any = 1, solution: Any = None) -> tuple[Any, Any]:
    EVENTS.clear()
    sides = Side("reference", reference), Side("solution", {} if solution is None else solution)
    trial = Trial(cast(Any, Machine(target)), cast(Any, sides[0]), cast(Any, sides[1]), 0)
    return trial._both("expect", "run", draw={})


def test_on_a_gpu_the_reference_works_while_the_solution_does() -> None:
    assert both(Target.CUDA) == (1, {})
    assert EVENTS == [
        "in", "solution gets run", "reference gets expect", "reference answers",
        "solution answers", "out",
    ]  # fmt: skip


def test_on_a_cpu_they_take_turns() -> None:
    assert both(Target.CPU) == (1, {})
    assert EVENTS[:4] == ["in", "reference gets expect", "reference answers", "out"]


@pytest.mark.parametrize("target", Target)
def test_each_side_answers_for_itself(target: Target) -> None:
    with pytest.raises(Refusal, match="run: gone") as refusal:
        both(target, solution=WorkerCrash("gone"))
    assert refusal.value.status is VerdictStatus.CRASH
    with pytest.raises(Refusal, match="not an answer") as refusal:
        both(target, solution=["no", "dict"])
    assert refusal.value.status is VerdictStatus.INTEGRITY
    with pytest.raises(WorkerError, match="ours"):
        both(target, reference=WorkerCrash("ours"))
    assert ("solution is ended" in EVENTS) == (target is Target.CUDA)


@pytest.mark.parametrize("reply", [{}, {"ms": -1.0}, {"ms": "fast"}, {"ms": float("nan")}])
def test_a_rehearsal_must_take_time(reply: Any) -> None:
    sides = Side("reference", 1), Side("solution", reply)
    trial = Trial(cast(Any, Machine(Target.CPU)), cast(Any, sides[0]), cast(Any, sides[1]), 0)
    with pytest.raises(Refusal, match="not a time") as refusal:
        trial.calibrate()
    assert refusal.value.status is VerdictStatus.INTEGRITY


class Timed(Side):
    """A solution whose calls take 1 ms, 2 ms, 3 ms, ... by its own clock."""

    calls = 0
    after_copy: tuple[float, ...] = ()
    copied = False

    def call(self, method: str, timeout_s: float, **params: Any) -> Any:
        if method == "call":
            self.calls += 1
            self.after_copy += (float(self.calls),) if self.copied else ()
            self.copied = False
        self.copied |= method == "keep"
        return {"ms": float(self.calls)}


@pytest.mark.parametrize("calls", [1, 2, 6])
def test_the_call_after_a_copy_is_not_timed(calls: int) -> None:
    """It asks the driver for the memory that the copy has taken."""
    solution = Timed("solution", {})
    trial = Trial(
        cast(Any, Machine(Target.CPU)), cast(Any, Side("reference", 1)), cast(Any, solution), 0
    )
    trial._eager_ms = 1e6  # nothing is slow against it
    timed: list[float] = []
    for _ in range(20):  # which call is copied is drawn
        samples = trial._time_solution(calls, keep=True)
        assert len(samples) == calls
        timed += samples
    assert len(solution.after_copy) == 20
    assert not set(timed) & set(solution.after_copy)
