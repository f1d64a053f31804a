"""Screening a composed problem: the admission rules, each refusal with its reason.

The rules themselves run in the reference's process (`verification.workers.screening`); this side
owns the leases, the clock band and the roofline.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from runtime.sandbox import Worker, WorkerError
from runtime.trace import OperatorNode, declared_operators
from schemas.codec import content_key, from_json, to_json
from schemas.records import Admission, AdmitReason, Problem, Target
from verification.bench import fresh_seed
from verification.harness import harness_hash
from verification.judge import open_reference
from verification.machine import Machine
from verification.roofline import roofline_ms
from verification.room import NoRoom, was_full, with_room

EAGER_BAND_MS = {Target.CPU: (1.0, 100.0), Target.CUDA: (1.0, 100.0)}
TIMED_CALLS = 5
MEANINGLESS = (
    AdmitReason.TRIVIAL_ANSWER,
    AdmitReason.CONSTANT_OUTPUT,
    AdmitReason.UNSUPPORTED,
    AdmitReason.CRASH,
    AdmitReason.TIMEOUT,
)


class SignatureLike(Protocol):
    """What `dedup.signature.signature` returns."""

    @property
    def operators(self) -> tuple[str, ...]: ...
    @property
    def ngrams(self) -> tuple[str, ...]: ...
    @property
    def ngrams_attributes(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, kw_only=True)
class _Operators:
    """What a problem computes, where nothing is to be compared with other problems."""

    operators: tuple[str, ...]
    ngrams: tuple[str, ...] = ()
    ngrams_attributes: tuple[str, ...] = ()

    @staticmethod
    def of(nodes: Sequence[OperatorNode]) -> _Operators:
        return _Operators(operators=tuple(node.operator for node in nodes))


def admit(
    problem: Problem,
    machine: Machine,
    signature: Callable[[Sequence[OperatorNode]], SignatureLike],
    declared: Sequence[str],
) -> Admission:
    """Screen a problem; from the store if this harness has screened it on this device before.

    `signature` makes the n-grams of an operator graph; `declared` are the call names the problem
    says it makes, in any order. Raises NoRoom when a GPU stays full of others' memory.
    """
    return _screen_once(problem, machine, signature, sorted(declared))


def prepare(problem: Problem, machine: Machine) -> Admission:
    """Screen a problem for a verdict, not for a data set: somebody's own, which declares nothing.

    The same rules, but for the declaration; no n-grams. A refusal is a doubt about the problem
    and need not be the end: see `is_meaningless`. Raises NoRoom as `admit` does.
    """
    return _screen_once(problem, machine, _Operators.of, None)


def is_meaningless(admission: Admission) -> bool:
    """Whether a verdict on this problem would say nothing: a constant or its own input passes,
    or the reference does not live to be compared with."""
    return admission.reason in MEANINGLESS


def _screen_once(
    problem: Problem,
    machine: Machine,
    signature: Callable[[Sequence[OperatorNode]], SignatureLike],
    declared: list[str] | None,
) -> Admission:
    key = content_key(harness_hash(), problem.problem_id, declared, machine.environment)
    found = machine.recall("admissions", key)
    if found is not None:
        return from_json(Admission, found)
    admission = with_room(
        lambda: _screen(problem, machine, signature, declared), _no_room, machine.room_pauses_s
    )
    if machine.room_pauses_s and _no_room(admission):
        raise NoRoom(
            f"{machine.device} was full {len(machine.room_pauses_s) + 1} times, lower "
            f"--num_workers_local or --device_memory_gib: {admission.detail}"
        )
    limited = admission.reason in (AdmitReason.TIMEOUT, AdmitReason.OUT_OF_MEMORY)
    machine.remember("admissions", key, to_json(admission), limited)
    return admission


def _no_room(admission: Admission) -> bool:
    return admission.reason is AdmitReason.OUT_OF_MEMORY and was_full(admission.detail)


def _screen(
    problem: Problem,
    machine: Machine,
    signature: Callable[[Sequence[OperatorNode]], SignatureLike],
    declared: Sequence[str] | None,
) -> Admission:
    worker: Worker | None = None
    raised = AdmitReason.EAGER_ERROR
    try:
        worker = open_reference(problem, machine)
        # The rules run the reference many times.
        found = machine.ask(worker, "screen", steps=2, seed=fresh_seed())
        if found["reason"] is not None:
            return _refused(problem, machine, AdmitReason(found["reason"]), found["detail"])
        nodes = [from_json(OperatorNode, node) for node in found["nodes"]]
        made = Counter(declared_operators(nodes))
        if declared is not None and made != Counter(declared):
            detail = f"declared {sorted(declared)}, found {sorted(made.elements())}"
            return _refused(problem, machine, AdmitReason.DECLARED_OPS, detail)
        raised = AdmitReason.COMPILE_ERROR
        machine.compile(worker)
        times = _time(worker, machine)
    except WorkerError as error:
        return _refused(problem, machine, _reason(error, raised), str(error))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        # The worker runs the problem's code, which may write on any of its descriptors.
        detail = f"an answer that is not ours: {type(error).__name__}: {error}"
        return _refused(problem, machine, AdmitReason.CRASH, detail)
    finally:
        if worker is not None:
            machine.end(worker)
    if times is None:
        detail = "torch.compile and eager disagree"
        return _refused(problem, machine, AdmitReason.COMPILE_MISMATCH, detail)
    return _timed(problem, machine, found, times, signature(nodes))


def _time(worker: Worker, machine: Machine) -> dict[str, float] | None:
    """Median ms of eager and of torch.compile; None when the two disagree. Raises WorkerError."""
    machine.ask(worker, "make_ring", seed=fresh_seed())
    with machine.lease.exclusive():
        if not worker.call("check_compiled", machine.timeout_s)["same"]:
            return None
        worker.call("warm_up", machine.timeout_s)
        return {
            side: statistics.median(
                worker.call("time", machine.timeout_s, side=side, calls=TIMED_CALLS)
            )
            for side in ("eager", "compile")
        }


def _timed(
    problem: Problem,
    machine: Machine,
    found: dict[str, Any],
    times: dict[str, float],
    described: SignatureLike,
) -> Admission:
    """Outside the band it is refused, and keeps its times: they are true all the same."""
    low, high = EAGER_BAND_MS[machine.target]
    reason, detail = None, ""
    if not low <= times["eager"] <= high:
        reason = AdmitReason.TOO_FAST if times["eager"] < low else AdmitReason.TOO_SLOW
        detail = f"eager takes {times['eager']:.3f} ms, expected {low:g} to {high:g} ms"
    floor = roofline_ms(found["min_bytes"], found["flops"], problem.precision, machine.rates)
    return Admission(
        problem_id=problem.problem_id,
        reason=reason,
        detail=detail,
        operators=described.operators,
        ngrams=described.ngrams,
        ngrams_attributes=described.ngrams_attributes,
        eager_ms=times["eager"],
        compile_ms=times["compile"],
        roofline_ms=floor,
        headroom=times["compile"] / floor,
        min_bytes=found["min_bytes"],
        flops=found["flops"],
        environment=machine.environment,
    )


def _reason(error: WorkerError, raised: AdmitReason) -> AdmitReason:
    by_kind = {
        "timeout": AdmitReason.TIMEOUT,
        "crash": AdmitReason.CRASH,
        "out_of_memory": AdmitReason.OUT_OF_MEMORY,
        "runtime_error": raised,
    }
    return by_kind[error.kind]


def _refused(problem: Problem, machine: Machine, reason: AdmitReason, detail: str) -> Admission:
    return Admission(
        problem_id=problem.problem_id,
        reason=reason,
        detail=detail[:2000],
        operators=(),
        ngrams=(),
        ngrams_attributes=(),
        eager_ms=None,
        compile_ms=None,
        roofline_ms=None,
        headroom=None,
        min_bytes=None,
        flops=None,
        environment=machine.environment,
    )
