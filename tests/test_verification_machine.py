"""What a machine survives: builds that race, compilers that eat memory, a parent that is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from pathlib import Path

import psutil
import pytest

from kernel_agent import tracing
from kernel_agent.policy import Unsupported
from runtime.sandbox import Limits, Zygote
from schemas.records import Solution, Target
from tests import factories, samples
from verification import machine as machines
from verification.building import build as building
from verification.building.build import BuildError, build
from verification.building.toolchain import toolchain
from verification.machine import Machine, MachineSettings

ENTRY = "tests.sandbox_entry:handlers"


def _build(
    cache: Path, memory_gib: float = 16.0, run: building.Runner | None = None
) -> building.Build:
    tools = toolchain(Target.CPU)
    return build(samples.solution(), Target.CPU, tools, cache, 120.0, memory_gib, run=run)


def test_a_build_that_another_finishes_first_is_used_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its library may be in use already: by hash, by copy, by a process that has it loaded."""
    theirs: list[os.stat_result] = []

    def overtaken(command: list[str], folder: Path, timeout_s: float) -> tuple[int, str]:
        theirs.append(os.stat(_build(tmp_path).library))
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        return done.returncode, done.stdout

    found = os.stat(_build(tmp_path, run=overtaken).library)
    assert (found.st_ino, found.st_mtime_ns) == (theirs[0].st_ino, theirs[0].st_mtime_ns)
    assert len(list(tmp_path.iterdir())) == 1


def test_an_emptied_build_is_made_again(tmp_path: Path) -> None:
    library = _build(tmp_path).library
    library.unlink()
    again = _build(tmp_path)
    assert not again.cached
    assert again.library == library
    assert library.exists()


def test_a_compiler_has_limited_memory(tmp_path: Path) -> None:
    with pytest.raises(BuildError):
        _build(tmp_path, memory_gib=0.02)
    assert not list(tmp_path.iterdir())
    assert not _build(tmp_path).cached


@pytest.mark.parametrize("how", ["import time; time.sleep(60)", "import os; os._exit(3)"])
def test_a_problem_that_cannot_be_traced_is_one_the_policy_cannot_handle(
    cpu_machine: Machine, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(cpu_machine, "timeout_s", 1.0)
    with pytest.raises(Unsupported, match=r"tracing failed: (timeout|crash)"):
        tracing.trace(factories.problem(code=how), cpu_machine)


def test_a_killed_parent_costs_the_work_that_was_under_way_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines, "start_zygote", lambda *_: Zygote.start(warm=False))
    shared = Zygote.start(warm=False)
    machine = Machine(factories.machine_settings(tmp_path, zygote=shared.address))
    worker = machine.spawn(ENTRY, "solution")
    assert worker.call("ping", 30) == 1
    os.kill(psutil.Process(worker.pid).ppid(), signal.SIGKILL)
    for _ in range(2):
        assert machine.spawn(ENTRY, "solution").call("ping", 30) == 1
    assert machine.zygote.address != shared.address
    machine.close()
    shared.close()


class Assembled:
    """`assemble` that says when it runs, and waits to be let go on."""

    def __init__(self) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()
        self.threads: list[bool] = []

    def __call__(self, machine: Machine, solution: Solution, *_: object) -> str:
        self.threads.append(threading.current_thread() is threading.main_thread())
        if not self.threads[-1]:
            self.began.set()
            assert self.go_on.wait(10)
            raise BuildError("said by the build that is asked for")
        return solution.solution_id


def test_only_a_solution_is_kept_from_filling_the_mail(
    cpu_machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference makes its files, and a problem may have an output of gigabytes."""
    limits: dict[str, float] = {}

    def spied(entry: str, config: object, given: Limits, role: str) -> None:
        limits[role] = given.file_gib

    monkeypatch.setattr(cpu_machine.zygote, "spawn", spied)
    for role in ("reference", "solution"):
        cpu_machine.spawn(ENTRY, role, mail=str(tmp_path))
    assert limits == {"reference": cpu_machine.limits.file_gib, "solution": 1.0}
    (tmp_path / "output").write_bytes(bytes(2**20))
    cpu_machine.spawn(ENTRY, "solution", mail=str(tmp_path))
    assert limits["solution"] == pytest.approx(1 + 2 / 1024)


def test_a_build_ahead_is_waited_for_and_says_nothing_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assembled = Assembled()
    monkeypatch.setattr(machines, "assemble", assembled)
    monkeypatch.setattr(Machine, "toolchain", None)
    monkeypatch.setattr(Machine, "zygote", None)
    solution = samples.solution()
    settings = MachineSettings(
        target=Target.CUDA, device="cuda:0", store=str(tmp_path / "store"), cache=str(tmp_path)
    )
    with contextlib.closing(Machine(settings)) as machine:
        machine.build_ahead(solution)
        assert assembled.began.wait(10)  # beside this thread
        threading.Timer(0.2, assembled.go_on.set).start()
        assert machine.build(solution) == solution.solution_id
        assert assembled.go_on.is_set()
        assert assembled.threads == [False, True]


def test_nothing_is_built_ahead_beside_a_cpu_that_is_timed(cpu_machine: Machine) -> None:
    cpu_machine.build_ahead(samples.solution())
    assert not cpu_machine._ahead
