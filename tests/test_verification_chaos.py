"""Whatever a solution does to its surroundings, and whoever kills workers: the next verdict is
right, and none is lost."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections.abc import Iterator

import psutil
import pytest

from dedup.signature import signature
from schemas.records import Admission, Solution, VerdictStatus
from tests import samples
from verification.admission import admit
from verification.judge import Judge
from verification.machine import Machine

ACCEPTED = (VerdictStatus.CORRECT, VerdictStatus.UNMEASURED)


@pytest.fixture(scope="module")
def admission(cpu_machine: Machine) -> Admission:
    found = admit(samples.problem(), cpu_machine, signature, ("mul", "gelu"))
    assert found.reason is None, found.detail
    return found


@pytest.fixture(scope="module")
def judge(cpu_machine: Machine, admission: Admission) -> Iterator[Judge]:
    with Judge(samples.problem(), admission, cpu_machine) as made:
        yield made


def variant(number: int, old: str = "return out", new: str = "return out") -> Solution:
    """The honest solution, with one change, under a name of its own."""
    model, kernel = samples.MODEL_NEW, samples.KERNEL
    assert (old in model) != (old in kernel)
    return samples.solution(
        model.replace(old, new) + f"\n# variant {number}\n", kernel.replace(old, new)
    )


HOSTILE = {
    "hangs": "while True:\n            pass",
    "sleeps": "import time\n        time.sleep(600)",
    "forks": "import os\n        [os.fork() for _ in range(6)]\n        return out",
    "forks without end": "import os\n        while True:\n            os.fork()",
    "exhausts memory": "hoard = []\n        while True:\n"
    "            hoard.append(torch.ones(1 << 24))",
    "fills the disk": "f = open('work/big', 'wb')\n        while True:\n"
    "            f.write(bytes(1 << 22))",
    "writes outside its folder": "open('/etc/ops6k', 'w').write('x')",
    "leaves a daemon": "import os\n        if os.fork() == 0:\n            os.setsid()\n"
    "            while True:\n                pass\n        return out",
    "kills its group": "import os\n        os.killpg(0, 9)",
    "kills everything it may": "import os\n        os.kill(-1, 9)\n        return out",
    "segfaults": "import ctypes\n        ctypes.string_at(1)",
    "empties the mail": "import glob\n        for f in glob.glob('/run/ops6k-mail/*'):\n"
    "            os.truncate(f, 0)",
    "aborts": "import os\n        os.abort()",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_solution_harms_only_itself(
    judge: Judge, cpu_machine: Machine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = list(HOSTILE).index(name)
    monkeypatch.setattr(cpu_machine, "timeout_s", 8.0)
    verdict = judge.verify(variant(number, "return out", f"import os\n        {HOSTILE[name]}"))
    assert verdict.status not in (VerdictStatus.CORRECT, VerdictStatus.REFERENCE_ERROR), (
        verdict.reason
    )
    monkeypatch.undo()
    after = judge.verify(variant(100 + number))
    assert after.status in ACCEPTED, after.reason
    assert not os.path.exists("/etc/ops6k")


def test_one_kill_costs_an_honest_solution_nothing(judge: Judge) -> None:
    with killer(random.Random(1), every_s=0.7, at_most=1) as killed:
        verdict = judge.verify(variant(1000))
    assert len(killed) == 1
    assert verdict.status in ACCEPTED, verdict.reason


def test_a_solution_that_kills_itself_is_a_crash(judge: Judge) -> None:
    suicide = variant(1001, "return out", "import os\n        os.kill(os.getpid(), 9)")
    assert judge.verify(suicide).status is not VerdictStatus.CORRECT


@contextlib.contextmanager
def killer(draw: random.Random, every_s: float, at_most: int) -> Iterator[list[int]]:
    """Kills a random worker, of either side, now and then."""
    stop, killed = threading.Event(), list[int]()

    def work() -> None:
        while len(killed) < at_most and not stop.wait(draw.uniform(0.5, 1.5) * every_s):
            children = [
                child
                for parent in psutil.Process().children()
                for child in parent.children()
                if child.status() != psutil.STATUS_ZOMBIE
            ]
            with contextlib.suppress(ProcessLookupError, IndexError):
                victim = draw.choice(children).pid
                os.kill(victim, signal.SIGKILL)
                killed.append(victim)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield killed
    finally:
        stop.set()
        thread.join()


MIXED = (
    (("return out", "return out"), ACCEPTED),
    (("0.70710678f", "0.7f"), (VerdictStatus.INCORRECT,)),
    (("r < rows;", "r < rows - 1;"), (VerdictStatus.INCORRECT,)),
    (("return out", "raise ValueError('no')"), (VerdictStatus.RUNTIME_ERROR,)),
    (("return 0;", "return 0"), (VerdictStatus.BUILD_ERROR,)),
    (("return out", "return torch.nn.functional.gelu(x * self.weight)"),
     (VerdictStatus.INTEGRITY,)),
)  # fmt: skip
"""A change and what its verdict must be. Four of six are wrong, and refused in a second."""
NUM_MIXED = 200


@pytest.mark.slow
def test_two_hundred_solutions_while_workers_are_killed(judge: Judge) -> None:
    draw = random.Random(7)
    verdicts = []
    with killer(draw, every_s=6.0, at_most=10_000) as killed:
        for number in range(NUM_MIXED):
            (old, new), allowed = MIXED[number % len(MIXED)]
            made = variant(2000 + number, old, new)
            verdicts.append((judge.verify(made), allowed))
    assert len(verdicts) == NUM_MIXED
    assert len(killed) >= 10
    wrong = [(v.status, v.reason) for v, allowed in verdicts if v.status not in allowed]
    assert not wrong
