"""What a worker does wrong costs that worker, and the next one is fine."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from runtime.sandbox import (
    Limits,
    ParentGone,
    RemoteError,
    Worker,
    WorkerCrash,
    WorkerOutOfMemory,
    WorkerTimeout,
    Zygote,
)
from verification.machine import Machine

ENTRY = "tests.sandbox_entry:handlers"


@pytest.fixture
def worker(cpu_machine: Machine) -> Iterator[Worker]:
    made = cpu_machine.zygote.spawn(ENTRY, {}, Limits(memory_gib=1.0), "solution")
    yield made
    made.close()


def test_an_exception_is_an_answer_and_the_worker_lives(worker: Worker) -> None:
    with pytest.raises(RemoteError, match="ValueError: boom"):
        worker.call("boom", 10)
    assert worker.call("ping", 10) == 1


def test_no_network(worker: Worker, cpu_machine: Machine) -> None:
    isolation = worker.call("who", 10)["isolation"]
    if not isolation["network"]:
        pytest.skip("this machine gives no network namespace")
    assert worker.call("interfaces", 10) == ["lo"]
    with pytest.raises(RemoteError):
        worker.call("connect", 10)


def test_the_environment_is_an_allowlist(
    cpu_machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    zygote = Zygote.start()
    try:
        worker = zygote.spawn(ENTRY, {}, Limits(), "solution")
        seen = worker.call("who", 10)["environment"]
    finally:
        zygote.close()
    assert "secret" not in str(seen)
    assert "PATH" in seen


@pytest.mark.parametrize(
    ("method", "timeout_s", "error", "text"),
    [
        ("die", 10, WorkerCrash, "SIGSEGV"),
        ("leave", 10, WorkerCrash, "exited with code 0"),
        ("hang", 0.5, WorkerTimeout, "0.5 s"),
        ("eat", 30, WorkerOutOfMemory, "limit 1 GiB"),
        ("shout", 10, WorkerCrash, "not ours"),
    ],
)
def test_each_way_to_die_has_its_name(
    worker: Worker, cpu_machine: Machine, method: str, timeout_s: float, error: Any, text: str
) -> None:
    with pytest.raises(error, match=text):
        worker.call(method, timeout_s)
    after = cpu_machine.zygote.spawn(ENTRY, {}, Limits(), "solution")
    assert after.call("ping", 10) == 1
    after.close()


def test_a_large_file_is_refused(cpu_machine: Machine, tmp_path: Any) -> None:
    worker = cpu_machine.zygote.spawn(ENTRY, {}, Limits(file_gib=1 / 1024), "reference")
    with pytest.raises((RemoteError, WorkerCrash)):
        worker.call("fill", 30, path=str(tmp_path / "big"))
    worker.close()
    assert (tmp_path / "big").stat().st_size <= 1 << 20


def test_closing_kills_what_the_worker_started(worker: Worker) -> None:
    worker.call("fork_sleeper", 10)  # its id may be one of the worker's own namespace
    (child,) = (process.pid for process in psutil.Process(worker.pid).children())
    worker.close()
    deadline = time.monotonic() + 10
    while psutil.pid_exists(child) and time.monotonic() < deadline:
        if psutil.Process(child).status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(0.05)
    gone = not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert gone


def test_a_shared_parent_keeps_its_clients_apart(cpu_machine: Machine) -> None:
    """Two processes share one warm parent: when one goes, the other's workers live on."""
    one, two = (Zygote.connect(cpu_machine.zygote.address) for _ in range(2))
    first, second = (z.spawn(ENTRY, {}, Limits(), "solution") for z in (one, two))
    assert first.call("ping", 10) == second.call("ping", 10) == 1
    one.close()
    with pytest.raises((WorkerCrash, ParentGone)):
        first.call("hang", 10)
    assert second.call("ping", 10) == 1
    two.close()


@pytest.mark.parametrize("leave_first", [False, True])
def test_a_worker_cannot_have_workers(cpu_machine: Machine, leave_first: bool) -> None:
    """Not even one that runs as our own user and has left its process tree."""
    zygote = cpu_machine.zygote
    worker = zygote.spawn(ENTRY, {}, Limits(), "reference")
    answer = worker.call("ask_for_a_worker", 20, address=zygote.address, leave_first=leave_first)
    assert answer in ("", "BrokenPipeError", "ConnectionResetError")
    worker.close()


def test_a_long_request_arrives_whole(cpu_machine: Machine) -> None:
    code = "x" * 300_000
    worker = cpu_machine.zygote.spawn(ENTRY, {"code": code}, Limits(), "solution")
    assert worker.call("length", 10) == len(code)
    worker.close()


def test_no_parent_is_said_clearly() -> None:
    with pytest.raises(ParentGone, match="no warm parent at /nonexistent"):
        Zygote.connect("/nonexistent")


def test_a_dead_parent_is_nobodys_fault() -> None:
    """It is no WorkerError, so no problem is refused and no solution blamed for it."""
    zygote = Zygote.start(warm=False)
    worker = zygote.spawn(ENTRY, {}, Limits(), "solution")
    assert worker.call("ping", 30) == 1
    (parent,) = (
        p for p in psutil.Process().children() if worker.pid in {c.pid for c in p.children()}
    )
    parent.kill()
    with pytest.raises(ParentGone):
        worker.call("hang", 30)
    with pytest.raises(ParentGone):
        zygote.spawn(ENTRY, {}, Limits(), "solution")
    zygote.close()


def test_the_parent_dies_with_its_owner() -> None:
    """A killed pipeline leaves no workers behind."""
    import signal
    import subprocess
    import sys
    from pathlib import Path

    code = (
        "from runtime.sandbox import Limits, Zygote\n"
        f"w = Zygote.start().spawn({ENTRY!r}, {{}}, Limits(), 'solution')\n"
        "print(w.pid, flush=True)\nw.call('hang', 60)\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
    )
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    deadline = time.monotonic() + 20
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid)
