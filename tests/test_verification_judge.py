"""Verdicts on one problem: honest ones pass, each trick falls to the check meant for it."""

from __future__ import annotations

import dataclasses
import functools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dedup.signature import signature
from runtime.sandbox import Worker
from schemas.codec import from_json, to_json
from schemas.records import Admission, Solution, Verdict, VerdictStatus
from tests import factories, samples
from verification.admission import admit
from verification.bench import TORCH_DID_PART, UNWATCHED
from verification.gpu import FEW_CHANNELS, USUAL_CHANNELS
from verification.guards import Guard
from verification.judge import PROCESS_REPLACED, Judge, _no_room
from verification.machine import Machine
from verification.measuring import Stopwatch
from verification.policy import IsolationError, Policy
from verification.workers.solution_worker import _watcher


@pytest.fixture(scope="module")
def admission(cpu_machine: Machine) -> Admission:
    found = admit(samples.problem(), cpu_machine, signature, ("mul", "gelu"))
    assert found.reason is None, found.detail
    return found


@pytest.fixture(scope="module")
def judge(cpu_machine: Machine, admission: Admission) -> Iterator[Judge]:
    with Judge(samples.problem(), admission, cpu_machine) as made:
        yield made


def changed(old: str, new: str) -> Solution:
    """The honest solution with one change, in whichever file has `old`."""
    model, kernel = samples.MODEL_NEW, samples.KERNEL
    assert (old in model) != (old in kernel)
    return samples.solution(model.replace(old, new), kernel.replace(old, new))


def test_an_honest_solution_is_measured_whole(judge: Judge) -> None:
    verdict = judge.verify(samples.solution())
    assert verdict.status in (VerdictStatus.CORRECT, VerdictStatus.UNMEASURED), verdict.reason
    assert all(check.passed for check in verdict.checks)
    names = [check.name for check in verdict.checks]
    assert names[:5] == ["draw"] * 5
    assert "timed" in names
    assert {c.distribution for c in verdict.checks} >= {
        "natural", "centred", "large", "heavy", "structured", "needle",
    }  # fmt: skip
    assert verdict.attribution is not None
    assert verdict.attribution.knocked_out == 1
    assert verdict.solution is not None
    assert verdict.eager is not None
    assert verdict.aa_control is not None
    assert verdict.isolation is not None
    assert verdict.binary_hash
    assert from_json(Verdict, to_json(verdict)) == verdict


def test_a_fast_solution_is_called_as_often_as_the_baselines(judge: Judge) -> None:
    verdict = judge.verify(changed("return out", "return out  # as often"))
    assert verdict.solution is not None
    assert verdict.eager is not None
    timed, baseline = len(verdict.solution.samples_ms), len(verdict.eager.samples_ms)
    assert baseline >= 16  # two calls a round at least
    assert baseline // 2 < timed <= baseline  # a round may be cut short by a busy machine


def test_where_nobody_can_watch_the_verdict_says_so_and_is_not_published(
    cpu_machine: Machine, admission: Admission, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU machine without CUPTI."""
    ask = Machine.ask

    def blind(self: Machine, worker: Worker, method: str, **params: Any) -> Any:
        reply = ask(self, worker, method, **params)
        return {"unwatched": "there is no CUPTI"} if method == "load" else reply

    monkeypatch.setattr(Machine, "ask", blind)
    with Judge(samples.problem(), admission, cpu_machine) as judge:
        made = changed("return out", "return out  # watched by nobody")
        paid, published = judge.verify(made), judge.verify(made, "publish")
    assert UNWATCHED in paid.labels and paid.passed
    assert published.status is VerdictStatus.UNMEASURED
    assert published.reason.endswith("there is no CUPTI")
    assert UNWATCHED in published.labels
    assert published.speedup_eager is None


def test_what_works_on_several_streams_gets_several_channels(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU every other worker has one queue to the device, which makes its context cheap."""
    told: list[Any] = []
    spawn = Machine.spawn

    def spied(self: Machine, entry: str, role: str, *more: Any, **config: Any) -> Worker:
        if "solution_worker" in entry:
            told.append(config["environment"])
        return spawn(self, entry, role, *more, **config)

    monkeypatch.setattr(Machine, "spawn", spied)
    judge.verify(changed("return out", "return out  # on torch.cuda.current_stream()"))
    judge.verify(changed("return out", "return out  # on torch.cuda.Stream()"))
    assert told == [FEW_CHANNELS, USUAL_CHANNELS]


@pytest.mark.parametrize(
    ("doubts", "replaced", "status"),
    [
        ([Guard.AA_CONTROL], 1, VerdictStatus.CORRECT),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ([Guard.AA_CONTROL, Guard.DEVICE_STATE], 2, VerdictStatus.CORRECT),
                ([Guard.AA_CONTROL] * 3, 2, VerdictStatus.UNMEASURED),
                ([Guard.BASELINE_DRIFT], 0, VerdictStatus.UNMEASURED),
                ([Guard.OUTPUT_READY], 0, VerdictStatus.UNMEASURED),
            )
        ),
    ],
)
def test_a_process_beside_which_the_machine_was_not_quiet_is_made_up_for(
    judge: Judge,
    monkeypatch: pytest.MonkeyPatch,
    doubts: list[Guard],
    replaced: int,
    status: VerdictStatus,
) -> None:
    """The first processes are doubtful in every attempt; what a solution could do itself stays."""
    measured: list[Stopwatch] = []

    def doubt(self: Stopwatch) -> None:
        if self not in measured:
            measured.append(self)
        index = measured.index(self)
        self.doubts = [f"{doubts[index]}: as told"] if index < len(doubts) else []

    monkeypatch.setattr(Stopwatch, "_doubt", doubt)
    again = changed("return out", f"return out  # beside {doubts}")
    verdict = judge.verify(again, "publish")
    assert verdict.status is status, verdict.reason
    assert len(measured) == 5 + replaced
    assert verdict.processes == 5
    assert (PROCESS_REPLACED in verdict.labels) is bool(replaced)


def test_what_is_not_isolated_fully_is_not_published(
    cpu_machine: Machine, admission: Admission, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any work, unless the policy says that this is known; a reward is paid all the same."""
    partial = dataclasses.replace(cpu_machine.isolation, network=False)
    monkeypatch.setitem(cpu_machine.__dict__, "isolation", partial)
    made = changed("return out", "return out  # partly isolated")
    with Judge(samples.problem(), admission, cpu_machine) as judge:
        monkeypatch.setattr(Judge, "_measure", lambda *_: pytest.fail("work was done"))
        with pytest.raises(IsolationError, match="expected full isolation"):
            judge.verify(made, "publish")
    known = Policy(partial_isolation=True)
    measured = factories.verdict()
    monkeypatch.setattr(Judge, "_measure", lambda *_: measured)
    with Judge(samples.problem(), admission, cpu_machine, known) as judge:
        assert judge.verify(made, "publish") == measured


def test_operators_of_torch_do_part_of_the_work_where_a_policy_lets_them(
    judge: Judge, cpu_machine: Machine, admission: Admission
) -> None:
    mixed = changed(
        "lib.scale_gelu(x, self.weight,",
        "lib.scale_gelu(x * self.weight, torch.ones_like(self.weight),",
    )
    refused = judge.verify(mixed)
    assert refused.reason.startswith(Guard.DISPATCH_AUDIT), refused.reason
    policy = Policy(libraries=frozenset({"torch"}))
    with Judge(samples.problem(), admission, cpu_machine, policy) as lenient:
        allowed = lenient.verify(mixed)
        assert allowed.passed, allowed.reason
        assert TORCH_DID_PART in allowed.labels
        only_torch = changed("return out", "return torch.nn.functional.gelu(x * self.weight)")
        verdict = lenient.verify(only_torch)
        assert verdict.reason.startswith(Guard.KNOCK_OUT), verdict.reason


def test_a_watcher_says_why_it_does_not_watch(tmp_path: Path) -> None:
    assert _watcher({"device": "cpu", "launches": ""}) == (None, "")
    assert _watcher({"device": "cuda:0", "launches": ""})[1] == "there is no CUPTI on this machine"
    nothing, why = _watcher({"device": "cuda:0", "launches": str(tmp_path / "none.so")})
    assert nothing is None and "none.so" in why


@pytest.mark.parametrize(
    ("effort", "rounds"), [("reward", 3), pytest.param("publish", 20, marks=pytest.mark.slow)]
)
def test_a_slow_solution_is_checked_on_a_timed_call_too(
    judge: Judge, effort: str, rounds: int
) -> None:
    """And not watched for longer than it takes to see that, unless its time is to be published."""
    slow = changed("return out", "import time\n        time.sleep(0.05)\n        return out")
    verdict = judge.verify(slow, effort)
    assert verdict.solution is not None, verdict.reason
    assert verdict.effort == effort
    # One call a round, unless the baseline happens to be slow.
    assert rounds <= len(verdict.solution.samples_ms) <= 2 * rounds
    assert "timed" in [check.name for check in verdict.checks]


def test_a_finished_verdict_is_not_measured_again(judge: Judge, cpu_machine: Machine) -> None:
    first = judge.verify(samples.solution())
    count = cpu_machine.store.count("verdicts")
    assert judge.verify(samples.solution()) == first
    assert cpu_machine.store.count("verdicts") == count


def test_seeds_are_new_for_every_verdict(judge: Judge) -> None:
    one = judge.verify(changed("return out", "return out  # one"))
    two = judge.verify(changed("return out", "return out  # two"))
    assert {c.seed for c in one.checks}.isdisjoint({c.seed for c in two.checks})


WRONG = {
    "a slightly wrong constant": ("0.70710678f", "0.7070f", VerdictStatus.INCORRECT),
    "zeros": ("out[r * cols + c] = 0.5f *", "out[r * cols + c] = 0.0f *", VerdictStatus.INCORRECT),
    "the last row left out": ("r < rows;", "r < rows - 1;", VerdictStatus.INCORRECT),
    "a smaller output": ("return out", "return out[:-1]", VerdictStatus.INCORRECT),
    "another dtype": ("return out", "return out.double()", VerdictStatus.INCORRECT),
    "a tuple": ("return out", "return (out,)", VerdictStatus.INCORRECT),
    "a list of nothing": ("return out", "return None", VerdictStatus.RUNTIME_ERROR),
    "an exception": ("return out", "raise ValueError('no')", VerdictStatus.RUNTIME_ERROR),
    "a parameter that is not there": ("self.weight =", "self.scale =", VerdictStatus.RUNTIME_ERROR),
    "inputs zeroed": ("return out", "x.zero_()\n        return out", VerdictStatus.INTEGRITY),
    "the input returned": ("return out", "x.copy_(out)\n        return x", VerdictStatus.INTEGRITY),
    "a wild write": ("out[r * cols + c] =", "out[(r << 40) + c] =", VerdictStatus.CRASH),
    "text that is no C++": ("return 0;", "return 0", VerdictStatus.BUILD_ERROR),
    "an error code": ("return 0;", "return 7;", VerdictStatus.RUNTIME_ERROR),
    "leaving early": ("lib = cabi.load()", "import os\nos._exit(0)", VerdictStatus.CRASH),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_solutions_are_refused_for_what_is_wrong(judge: Judge, name: str) -> None:
    old, new, status = WRONG[name]
    verdict = judge.verify(changed(old, new))
    assert verdict.status is status, verdict.reason
    assert verdict.speedup_compile is None


TRICKS = {
    # One buffer for all calls: earlier results change.
    "static output": ("out = torch.empty_like(x)", "out = self.out = getattr(self, 'out', "
                      "torch.empty_like(x))", VerdictStatus.INTEGRITY),
    # Honest five times, then never again: only outputs of timed calls show it.
    "call counter": ("lib.scale_gelu(", "self.n = getattr(self, 'n', 0) + 1\n        "
                     "if self.n <= 5: lib.scale_gelu(", VerdictStatus.INCORRECT),
    # Answers remembered by address: inputs are rewritten in place between timed calls.
    "memory by address": (
        "out = torch.empty_like(x)",
        "m = self.__dict__.setdefault('m', {})\n        if x.data_ptr() in m: "
        "return m[x.data_ptr()].clone()\n        out = m[x.data_ptr()] = torch.empty_like(x)",
        VerdictStatus.INCORRECT,
    ),
    # A tensor subclass that could compute when it is looked at.
    "lazy output": ("return out", "return out.as_subclass(type('Lazy', (torch.Tensor,), {}))",
                    VerdictStatus.RUNTIME_ERROR),
}  # fmt: skip


@pytest.mark.parametrize("name", TRICKS)
def test_tricks_fall_to_the_check_meant_for_them(judge: Judge, name: str) -> None:
    old, new, status = TRICKS[name]
    verdict = judge.verify(changed(old, new))
    assert verdict.status is status, verdict.reason


def test_the_judge_believes_its_own_clock(judge: Judge) -> None:
    """A solution that stops its own clock is timed by the judge's."""
    honest = judge.verify(samples.solution())
    slow_liar = samples.MODEL_NEW.replace(
        "lib = cabi.load()",
        "lib = cabi.load()\nimport time\nreal = time.perf_counter\n"
        "time.perf_counter = lambda: real() * 1e-6",
    ).replace("return out", "time.sleep(0.02)\n        return out")
    verdict = judge.verify(samples.solution(slow_liar))
    assert honest.solution is not None
    assert verdict.solution is not None, verdict.reason
    assert verdict.solution.median_ms > 15.0


def test_an_answer_to_the_call_before_is_none_to_this_one(judge: Judge) -> None:
    """Given once in fifty calls: repeats of the same inputs alone would not show it."""
    stale = changed(
        "return out",
        "self.calls = self.__dict__.get('calls', 0) + 1\n"
        "        if self.calls % 50 == 49:\n            return self.last.clone()\n"
        "        self.__dict__['last'] = out\n        return out",
    )
    verdict = judge.verify(stale, "publish")
    assert verdict.status is VerdictStatus.INCORRECT
    assert verdict.reason.startswith(f"{Guard.REPEATS}: "), verdict.reason


def test_forged_replies_do_not_help(judge: Judge) -> None:
    """Text on every descriptor is not an answer, and ends the worker."""
    forged = samples.MODEL_NEW.replace(
        "return out",
        "import os\n        for fd in range(3, 40):\n            try:\n"
        '                os.write(fd, b\'{"result": {"structure": "tensor"}}\\n\')\n'
        "            except OSError:\n                pass\n        return out",
    )
    verdict = judge.verify(samples.solution(forged))
    assert verdict.status is not VerdictStatus.CORRECT


def test_every_output_must_be_handed_over(judge: Judge) -> None:
    """A forged description of fewer, more or other outputs is no way around the comparison."""
    for outputs in ("[]", "reply['outputs'] * 2", "[{'shape': [1], 'dtype': 'float32'}]"):
        forged = samples.MODEL_NEW.replace(
            "lib = cabi.load()",
            "lib = cabi.load()\nfrom verification.workers import solution_worker as w\n"
            "honest = w.Candidate._send\n"
            "def send(self, *args):\n    reply = honest(self, *args)\n"
            f"    return {{**reply, 'outputs': {outputs}}}\n"
            "w.Candidate._send = send",
        )
        verdict = judge.verify(samples.solution(forged))
        assert verdict.status is VerdictStatus.INCORRECT, (outputs, verdict.reason)


def test_a_limit_is_no_verdict_for_ever(cpu_machine: Machine, admission: Admission) -> None:
    """What ended at a limit is measured again under another one; what did not is not."""
    slow = samples.solution(
        samples.MODEL_NEW.replace(
            "return out", "import time\n        time.sleep(1.5)\n        return out"
        )
    )
    kept = cpu_machine.timeout_s
    with Judge(samples.problem(), admission, cpu_machine) as judge:
        honest = judge.verify(samples.solution())
        cpu_machine.timeout_s = 1.0
        try:
            assert judge.verify(slow).status is VerdictStatus.TIMEOUT
            count = cpu_machine.store.count("verdicts")
            assert judge.verify(slow).status is VerdictStatus.TIMEOUT
            assert judge.verify(samples.solution()) == honest
            assert cpu_machine.store.count("verdicts") == count
            cpu_machine.timeout_s = 1.1
            assert judge.verify(slow).status is VerdictStatus.TIMEOUT
            assert cpu_machine.store.count("verdicts") == count + 1
        finally:
            cpu_machine.timeout_s = kept


@pytest.mark.parametrize("pauses_s", [(), (0.0,)])
def test_memory_that_a_neighbour_had_is_asked_for_again(
    judge: Judge,
    cpu_machine: Machine,
    pauses_s: tuple[float, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_machine, "room_pauses_s", pauses_s)
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        shown = functools.partial(cpu_machine.spawn, view_write=[folder])
        monkeypatch.setattr(cpu_machine, "spawn", shown)
        full = f"os.mkdir({folder + '/tried'!r})\n            raise torch.OutOfMemoryError"
        full = f"if not os.path.exists({folder + '/tried'!r}):\n            {full}('full')"
        verdict = judge.verify(
            changed("return out", f"import os\n        {full}\n        return out")
        )
    expected = VerdictStatus.CORRECT if pauses_s else VerdictStatus.OUT_OF_MEMORY
    assert verdict.status is expected, verdict.reason


def test_a_reference_without_room_is_a_reason_to_wait_too(judge: Judge) -> None:
    verdict = judge.verify(changed("return out", "return x"))
    assert not verdict.passed
    for status, reason, again in (
        (VerdictStatus.REFERENCE_ERROR, "out_of_memory: OutOfMemoryError: full", True),
        (VerdictStatus.REFERENCE_ERROR, "crash: killed by SIGKILL", False),
        (VerdictStatus.OUT_OF_MEMORY, "run: full", True),
        (VerdictStatus.TIMEOUT, "run: out_of_memory:", False),
    ):
        failed = dataclasses.replace(verdict, status=status, reason=reason)
        assert _no_room(failed) is again


def test_the_reference_is_not_in_the_solutions_process(judge: Judge) -> None:
    peek = samples.MODEL_NEW.replace(
        "return out",
        "import gc, sys\n"
        "        names = [type(o).__name__ for o in gc.get_objects()]\n"
        "        if 'Model' in names or 'Reference' in names or 'problem' in sys.modules:\n"
        "            raise SystemError('the reference is here')\n"
        "        return out",
    )
    verdict = judge.verify(samples.solution(peek))
    assert verdict.status in (VerdictStatus.CORRECT, VerdictStatus.UNMEASURED), verdict.reason
