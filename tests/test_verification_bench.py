"""Who is to blame when one of two workers fails, and that on a GPU both work at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from runtime.sandbox import WorkerCrash, WorkerError
from schemas.records import Target, VerdictStatus
from verification import device_state
from verification.bench import Bench, Refusal
from verification.calibration import Surroundings
from verification.checking import _fair_call
from verification.guards import Guard
from verification.measuring import Stopwatch

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

    def call(self, method: str, timeout_s: float, spin_s: float = 0.0, **params: Any) -> Any:
        self.send(method, **params)
        return self.receive(timeout_s)


class Machine:
    timeout_s = 1.0

    def __init__(self, target: Target) -> None:
        self.target, self.lease = target, SimpleNamespace(shared=self.shared)
        self.device_watch = SimpleNamespace(sample=lambda: None)

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        EVENTS.append("in")
        yield
        EVENTS.append("out")

    def ask(self, worker: Side, method: str, **params: Any) -> Any:
        with self.shared():
            return worker.call(method, self.timeout_s, **params)


def bench(target: Target, reference: Side, solution: Side) -> Bench:
    machine, one, two = cast(Any, Machine(target)), cast(Any, reference), cast(Any, solution)
    return Bench(machine, one, two, 0)


def both(target: Target, reference: Any = 1, solution: Any = None) -> tuple[Any, Any]:
    EVENTS.clear()
    sides = Side("reference", reference), Side("solution", {} if solution is None else solution)
    return bench(target, *sides).both(("expect", {"draw": {}}), ("run", {"draw": {}}))


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


def stopwatch(reference: Side, solution: Side) -> Stopwatch:
    admission = SimpleNamespace(eager_ms=2.0, compile_ms=1.0)
    return Stopwatch(bench(Target.CPU, reference, solution), cast(Any, admission))


def test_a_guard_that_is_off_refuses_nothing() -> None:
    sides = cast(Any, Side("reference", 1)), cast(Any, Side("solution", 1))
    off = Bench(cast(Any, Machine(Target.CPU)), *sides, 0, off={Guard.ALIASES})
    off.require(Guard.ALIASES, False, "shares memory")
    with pytest.raises(Refusal, match="live_outputs: changed"):
        off.require(Guard.LIVE_OUTPUTS, False, "changed")


HONEST = {"checksum": 1, "inputs_kept": True, "bands_kept": True, "aliases": False}


@pytest.mark.parametrize(
    ("reply", "wanted", "guard"),
    [
        ({}, {}, None),
        ({"aliases": True}, {}, Guard.ALIASES),
        ({"aliases": True}, {"aliases": True}, None),  # the reference returns a view too
        ({"inputs_kept": False}, {}, Guard.INPUTS_KEPT),
        ({"bands_kept": False}, {}, Guard.GUARD_BANDS),
        ({"computed": ["aten.mm"]}, {}, Guard.DISPATCH_AUDIT),
    ],
)
def test_what_a_call_must_leave_alone(
    reply: dict[str, Any], wanted: dict[str, Any], guard: Guard | None
) -> None:
    sides = Side("reference", 1), Side("solution", 1)
    refused = pytest.raises(Refusal, match=f"^{guard}: ") if guard else contextlib.nullcontext()
    with refused:
        _fair_call(bench(Target.CPU, *sides), {**HONEST, **wanted}, {**HONEST, **reply})


ROUNDS = {
    "eager": [[2.0, 2.0]] * 4,
    "compile": [[1.0, 1.0]] * 4,
    "control": [[1.0, 1.0]] * 4,
    "solution": [[0.8, 0.8]] * 4,
}


@pytest.mark.parametrize(
    ("guard", "change"),
    [
        (None, {}),
        (Guard.AA_CONTROL, {"control": [[1.2, 1.2]] * 4}),
        (Guard.BASELINE_DRIFT, {"eager": [[6.1, 6.1]] * 4}),
        (None, {"eager": [[6.04, 6.04]] * 4}),  # three times as slow, and launches
        (Guard.OUTPUT_READY, {"keep_ms": [3.2, 2.2]}),
        (None, {"keep_ms": [9.0, 1.2]}),  # one of two copies was interrupted
    ],
)
def test_what_makes_times_doubtful(guard: Guard | None, change: dict[str, Any]) -> None:
    watch = stopwatch(Side("reference", 1), Side("solution", 1))
    watch._keep_ms = change.pop("keep_ms", [1.0, 1.0])
    watch._usual = Surroundings(copy_ms=1.0)
    watch.rounds = ROUNDS | change
    watch._doubt()
    assert [doubt.split(":")[0] for doubt in watch.doubts] == ([str(guard)] if guard else [])


def test_bare_calls_are_believed_where_they_say_more() -> None:
    """A process that leaves out 0.5 ms around its timed calls is charged for them."""
    watch = stopwatch(Side("reference", 1), Side("solution", 1))
    watch._usual, watch._around = Surroundings(launch_ms=0.1, around_ms=0.2), [0.2] * 8
    for bare, expected in (([0.9, 0.91, 0.92], 0.8), ([1.4, 1.4, 9.0], 1.3)):
        watch.rounds, watch._bare = dict(ROUNDS), bare
        watch._charge()
        assert watch.rounds["solution"][0][0] == pytest.approx(expected)


@pytest.mark.parametrize("reply", [{}, {"ms": -1.0}, {"ms": "fast"}, {"ms": float("nan")}])
def test_a_call_must_take_time(reply: Any) -> None:
    watch = stopwatch(Side("reference", {"ms": 1.0}), Side("solution", reply))
    with pytest.raises(Refusal, match="not a time") as refusal:
        watch._call_solution()
    assert refusal.value.status is VerdictStatus.INTEGRITY


class Timed(Side):
    """A solution whose calls take 1 ms, 2 ms, 3 ms, ... by its own clock."""

    calls = 0
    after_copy: tuple[float, ...] = ()
    copied = False

    def call(self, method: str, timeout_s: float, spin_s: float = 0.0, **params: Any) -> Any:
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
    watch = stopwatch(Side("reference", 1), solution)
    watch._usual = Surroundings(eager_ms=1e6)  # nothing is slow against it
    timed: list[float] = []
    for _ in range(20):  # which call is copied is drawn
        samples = watch._time_solution(calls, keep=True)
        assert len(samples) == calls
        timed += samples
    assert len(solution.after_copy) == 20
    assert not set(timed) & set(solution.after_copy)


class Answers(Side):
    """Either side; every call takes a millisecond."""

    pid = 1 << 30  # nobody's

    def call(self, method: str, timeout_s: float, spin_s: float = 0.0, **params: Any) -> Any:
        return [1.0] * params["calls"] if method == "time" else {"ms": 1.0}


def look(reasons: int) -> device_state.Sample:
    return device_state.Sample(
        sm_clock_mhz=1980.0, temperature_c=40.0, power_w=300.0, reasons=reasons
    )


@pytest.mark.parametrize(
    ("looks", "rounds", "discarded", "doubtful"),
    [
        ([0] * 8, 8, 0, False),
        ([0, 0x40, 0, 0, 0, 0, 0, 0, 0], 8, 1, False),  # one hot round is measured again
        ([0x04] * 8, 8, 0, False),  # a power cap is no fault
        ([0x08] * 8, 0, 2, True),  # slowed down for good: an answer, and no empty success
    ],
)
def test_rounds_of_a_throttled_device_do_not_count(
    looks: list[int], rounds: int, discarded: int, doubtful: bool
) -> None:
    watch = stopwatch(Answers("reference", 1), Answers("solution", 1))
    watch._usual, trace = Surroundings(eager_ms=1e6, copy_ms=1.0), iter(looks)
    machine = cast(Any, watch._bench.machine)
    machine.device_watch = SimpleNamespace(sample=lambda: look(next(trace)))
    watch._rounds(8, watch_on=True)
    assert len(watch.rounds["solution"]) == len(watch.rounds["eager"]) == rounds
    assert watch.discarded == discarded
    watch._keep_ms = [1.0]
    watch._doubt()
    assert any(d.startswith("device_state") for d in watch.doubts) is doubtful
    found = device_state.summary(watch.states, watch.discarded)
    assert found is not None
    assert found.discarded_rounds == discarded
