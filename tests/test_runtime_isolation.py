"""Each limit of a worker against an attempt to get past it.

Every attempt is also made by a process that nothing confines, where it must work: otherwise it
proves nothing. What a machine does not give is skipped here and said by `pipelines.doctor`.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from runtime import seccomp
from runtime.linux import CLONE_NEWNS, call
from runtime.sandbox import (
    ROLES,
    Limits,
    RemoteError,
    Worker,
    WorkerError,
    WorkerOutOfMemory,
    Zygote,
)
from runtime.view import ROOT, enter, view_of
from tests import sandbox_entry
from verification.gpu import device_files
from verification.machine import Machine

ENTRY = "tests.sandbox_entry:handlers"
Make = Callable[..., Worker]


def control(attempt: str, **params: Any) -> Any:
    """What the attempt comes to in a process of its own that nothing confines."""
    command = [sys.executable, "-m", "tests.sandbox_entry", attempt, json.dumps(params)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def make(cpu_machine: Machine) -> Iterator[Make]:
    """Makes workers of the role `solution`; skips where the machine lacks a part."""
    made: list[Worker] = []

    def maker(*parts: str, limits: Limits | None = None, **config: Any) -> Worker:
        worker = cpu_machine.zygote.spawn(
            ENTRY, config, limits or Limits(memory_gib=1.0), "solution"
        )
        made.append(worker)
        who = worker.call("who", 30)
        for part in parts:
            if not who["isolation"][part]:
                pytest.skip(f"no {part} on this machine: {who['why_not']}")
        return worker

    yield maker
    for worker in made:
        worker.close(wait_s=5)


@pytest.fixture
def scratch(cpu_machine: Machine) -> Iterator[Path]:
    with cpu_machine.scratch() as folder:
        yield folder


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A folder outside of all that is private in a view."""
    folder = Path("/var") / f"ops6k-test-{uuid.uuid4().hex}"
    folder.mkdir()
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def refused(worker: Worker, attempt: str, **params: Any) -> str:
    with pytest.raises(RemoteError) as error:
        worker.call(attempt, 30, **params)
    return error.value.type


def test_this_machine_takes_everything_away_as_root(make: Make) -> None:
    if os.getuid() != 0 or not Path("/proc/self/ns/pid").exists():
        pytest.skip("needs root")
    who = make().call("who", 10)
    assert who["isolation"] == dict.fromkeys(who["isolation"], True), who["why_not"]
    assert who["uid"] != os.getuid()


def test_honest_work_goes_on(make: Make, scratch: Path) -> None:
    worker = make(scratch=str(scratch))
    done = worker.call("honest_work", 60, folder=str(scratch / "work"))
    assert done == dict.fromkeys(done, True)


# The network.


def test_no_connection(make: Make) -> None:
    worker = make("network")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert control("connect", host="127.0.0.1", port=port)
        refused(worker, "connect", host="127.0.0.1", port=port)


def test_no_way_to_the_host_of_a_virtual_machine(make: Make) -> None:
    """AF_VSOCK belongs to no network namespace."""
    worker = make("syscalls")
    for family in (socket.AF_INET, socket.AF_INET6, socket.AF_VSOCK):
        assert refused(worker, "open_socket", family=int(family)) == "PermissionError"
    assert control("open_socket", family=int(socket.AF_INET))
    assert worker.call("open_socket", 10, family=int(socket.AF_UNIX))


def test_the_warm_parent_does_not_listen(make: Make, cpu_machine: Machine) -> None:
    worker = make("filesystem")
    address = cpu_machine.zygote.address
    assert control("ask_for_a_worker", address=address, leave_first=False)  # a number of ours
    with pytest.raises(RemoteError):
        worker.call("ask_for_a_worker", 20, address=address, leave_first=False)


# Files.


def outside(tmp_path: Path) -> list[Path]:
    name = f"ops6k-escape-{uuid.uuid4().hex}"
    return [Path.home() / name, Path("/etc") / name, Path(ROOT) / name, tmp_path / name]


def test_nothing_is_written_outside(make: Make, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    worker = make("filesystem", view_hide=[str(tmp_path)])
    for path in outside(tmp_path):
        refused(worker, "make", path=str(path))
        if os.access(path.parent, os.W_OK):
            assert control("make", path=str(path))
            path.unlink()


@pytest.mark.parametrize("folder", ["/tmp", "/var/tmp", "/dev/shm"])
def test_temporary_folders_are_private(make: Make, folder: str) -> None:
    """What is there outside is not seen, what is left there is gone for the next worker."""
    path = Path(folder) / f"ops6k-left-{uuid.uuid4().hex}"
    worker = make("filesystem", "processes")
    assert control("make", path=str(path))
    assert refused(worker, "read", path=str(path)) == "FileNotFoundError"
    path.unlink()
    assert worker.call("make", 10, path=str(path))
    assert not path.exists()
    assert refused(make(), "read", path=str(path)) == "FileNotFoundError"


def test_secrets_cannot_be_read(make: Make, tmp_path: Path) -> None:
    """In a home, and in the store, whatever their modes."""
    home = Path.home() / f".ops6k-secret-{uuid.uuid4().hex}"
    stored = tmp_path / "store" / "secret"
    stored.parent.mkdir()
    worker = make("filesystem", view_hide=[str(stored.parent)])
    for path in (home, stored):
        path.write_text("secret")
        path.chmod(0o644)
        try:
            assert control("read", path=str(path)) == "secret"
            refused(worker, "read", path=str(path))
        finally:
            path.unlink()


def test_a_scratch_folder_is_read_and_only_its_work_folder_written(
    make: Make, scratch: Path
) -> None:
    (scratch / "model_new.py").write_text("mine")
    (scratch / "model_new.py").chmod(0o666)
    scratch.chmod(0o777)
    worker = make("filesystem", scratch=str(scratch))
    assert worker.call("who", 10)["folder"] == str(scratch / "work")
    assert worker.call("read", 10, path=str(scratch / "model_new.py")) == "mine"
    assert worker.call("make", 10, path=str(scratch / "work" / "made"))
    refused(worker, "make", path=str(scratch / "made"))
    refused(worker, "overwrite", path=str(scratch / "model_new.py"), text="x")
    (scratch / "later").write_text("later")
    assert worker.call("read", 10, path=str(scratch / "later")) == "later"


def test_a_folder_to_write_and_a_file_to_read(make: Make, tmp_path: Path) -> None:
    library, work = tmp_path / "library.so", tmp_path / "out"
    library.write_text("code")
    (tmp_path / "beside").write_text("other")
    work.mkdir()
    work.chmod(0o777)
    worker = make("filesystem", view_read=[str(library)], view_write=[str(work)])
    assert worker.call("read", 10, path=str(library)) == "code"
    assert worker.call("make", 10, path=str(work / "made"))
    assert (work / "made").read_text() == "mine"
    refused(worker, "read", path=str(tmp_path / "beside"))


@pytest.mark.skipif(os.getuid() != 0, reason="makes a folder in /var")
def test_a_hidden_folder_may_hold_one_that_is_written(make: Make, open_to_all: Path) -> None:
    """As a build's own folder in the cache of all builds."""
    work = open_to_all / "work"
    work.mkdir()
    work.chmod(0o777)
    (open_to_all / "secret").write_text("secret")
    worker = make("filesystem", view_hide=[str(open_to_all)], view_write=[str(work)])
    assert worker.call("make", 10, path=str(work / "made"))
    assert (work / "made").read_text() == "mine"
    refused(worker, "read", path=str(open_to_all / "secret"))
    refused(worker, "make", path=str(open_to_all / "made"))
    open_to_all.chmod(0o700)  # and may be closed to others
    worker = make("filesystem", view_write=[str(work)])
    assert worker.call("make", 10, path=str(work / "made too"))
    refused(worker, "read", path=str(open_to_all / "secret"))
    assert control("read", path=str(open_to_all / "secret")) == "secret"
    assert control("make", path=str(open_to_all / "made"))


TAMPERING = ("truncate", "punch", "punch_mapped", "remove")


def test_mail_can_be_filled_and_no_more(make: Make, scratch: Path) -> None:
    def letter(name: str) -> str:
        file = scratch / name
        file.write_bytes(b"x" * 8192)
        file.chmod(0o666)
        return str(file)

    letter("output.0")
    worker = make("filesystem", "syscalls", mail=str(scratch))
    folder = Path(worker.call("who", 10)["mail"])
    first = str(folder / "output.0")
    assert worker.call("overwrite", 10, path=first, text="full")
    assert (scratch / "output.0").read_bytes()[:5] == b"fullx"
    assert worker.call("map_shared", 30, path=first)
    assert (scratch / "output.0").read_bytes()[:5] == b"mullx"
    for attempt in TAMPERING:
        refused(worker, attempt, path=first)
        assert control(attempt, path=letter(f"control.{attempt}"))
    refused(worker, "make", path=str(folder / "output.1"))
    scratch.chmod(0o777)  # its user could
    refused(worker, "make", path=str(folder / "output.1"))


@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm", "work"])
def test_private_folders_are_small(make: Make, scratch: Path, folder: str) -> None:
    limits = Limits(memory_gib=1.0, temporary_gib=1 / 64)
    worker = make("filesystem", "processes", limits=limits, scratch=str(scratch))
    path = str(scratch / "work" / "big") if folder == "work" else f"{folder}/big"
    assert refused(worker, "fill", path=path, mib=32) == "OSError"
    assert control("fill", path=str(scratch / "big"), mib=32) == 32 << 20


def test_a_large_file_is_refused(make: Make, scratch: Path) -> None:
    worker = make(limits=Limits(memory_gib=1.0, file_gib=1 / 512), scratch=str(scratch))
    refused(worker, "fill", path=str(scratch / "work" / "big"))
    assert control("fill", path=str(scratch / "big")) == 4 << 20


@pytest.mark.parametrize("write", [False, True])
def test_a_device_file_that_is_shut_cannot_be_opened(make: Make, write: bool) -> None:
    worker = make("filesystem", view_shut=["/dev/full", "/dev/ops6k-nowhere"])
    assert refused(worker, "open_device", path="/dev/full", write=write) == "PermissionError"
    assert worker.call("open_device", 10, path="/dev/zero", write=write)
    assert make().call("open_device", 10, path="/dev/full", write=write)
    assert control("open_device", path="/dev/full", write=write)


@pytest.mark.gpu
def test_the_driver_gives_no_gpu_whose_device_file_is_shut() -> None:
    """Whatever the environment says. The parent of the others here may have asked CUDA already."""
    files = device_files()
    numbers = ",".join(map(str, range(len(files))))
    zygote = Zygote.start(warm=False)
    try:
        worker, other = (
            zygote.spawn(ENTRY, {"view_shut": shut}, Limits(), "solution") for shut in (files, [])
        )
        if not worker.call("who", 60)["isolation"]["filesystem"]:
            pytest.skip("no view of files on this machine")
        assert worker.call("count_gpus", 60, shown=numbers) == 0
        assert other.call("count_gpus", 60, shown=numbers) > 0
    finally:
        zygote.close()
    assert control("count_gpus", shown=numbers) > 0


def test_compilers_give_way_to_what_is_timed(cpu_machine: Machine) -> None:
    told = {}
    for role in ROLES:
        worker = cpu_machine.zygote.spawn(ENTRY, {}, Limits(), role)
        told[role] = worker.call("who", 60)["nice"]
        worker.close()
    assert told["builder"] > told["solution"] == told["reference"] == os.nice(0)


def test_variables_are_set_before_anything_else(make: Make) -> None:
    """Those of a worker are its own, and what is ours to say stays ours."""
    told = {"CUDA_VISIBLE_DEVICES": "GPU-1", "HOME": "/root"}
    seen = make(environment=told).call("who", 10)["environment"]
    assert seen["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert seen["HOME"] != "/root"
    assert make().call("who", 10)["environment"].get("CUDA_VISIBLE_DEVICES") != "GPU-1"


@pytest.mark.parametrize("attempt", ["mount", "become_root_somewhere"])
def test_nothing_is_mounted(make: Make, attempt: str) -> None:
    refused(make("syscalls"), attempt)
    if os.getuid() == 0:
        assert control(attempt)


def test_few_files_are_open(make: Make) -> None:
    worker = make(limits=Limits(memory_gib=1.0, open_files=64))
    assert refused(worker, "many_files", count=200) == "OSError"
    assert control("many_files", count=200) == 200


# Other processes.


@pytest.fixture
def victim() -> Iterator[int]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        process.kill()


def test_other_processes_are_not_seen(make: Make, victim: int) -> None:
    worker = make("processes")
    assert victim in control("processes")
    assert worker.call("processes", 10) == [1]
    assert control("signal_to", pid=victim)
    assert refused(worker, "signal_to", pid=victim) == "ProcessLookupError"


@pytest.mark.parametrize("attempt", ["attach", "peek"])
def test_other_processes_are_not_looked_into(make: Make, victim: int, attempt: str) -> None:
    worker = make("syscalls")
    if os.getuid() == 0:
        assert control(attempt, pid=victim)
    refused(worker, attempt, pid=victim)


def test_no_program_is_started(make: Make) -> None:
    worker = make("syscalls")
    assert control("shell") == "out\n"
    assert refused(worker, "shell") == "PermissionError"


def test_a_daemon_ends_with_its_worker(make: Make, tmp_path: Path) -> None:
    worker = make("processes")
    assert worker.call("daemon", 10)
    (left,) = psutil.Process(worker.pid).children()
    worker.close(wait_s=5)
    assert _gone(left)
    assert control("daemon", path=str(tmp_path / "pid"))
    other = psutil.Process(int((tmp_path / "pid").read_text()))
    assert other.ppid() != os.getpid()  # it lives, and is nobody's
    other.kill()


def _gone(process: psutil.Process) -> bool:
    deadline = time.monotonic() + 10
    while process.is_running() and time.monotonic() < deadline:
        time.sleep(0.02)
    return not process.is_running()


def test_a_fork_bomb_is_bounded(make: Make) -> None:
    worker = make("limits", limits=Limits(memory_gib=64.0, processes=32))
    assert 0 < worker.call("fork_many", 60, count=100) <= 32
    assert control("fork_many", count=100) == 100


def test_one_workers_processes_are_not_counted_against_another(make: Make) -> None:
    limits = Limits(memory_gib=64.0, processes=16)
    bomb, other = make("user", limits=limits), make(limits=limits)
    bomb.send("fork_many", count=1000)
    assert other.call("fork_many", 60, count=8) == 8


@pytest.mark.parametrize("attempt", ["eat", "eat_in_a_child"])
def test_memory_is_bounded(make: Make, attempt: str) -> None:
    with pytest.raises(WorkerOutOfMemory, match="limit 1 GiB"):
        make("limits").call(attempt, 60)
    assert control(attempt, mib=1536) in (24, 7)


# The kernel.


def test_limits_are_not_raised_again(make: Make) -> None:
    refused(make("user"), "raise_limits")
    if os.getuid() == 0:
        assert control("raise_limits")


def test_system_calls_are_refused(make: Make) -> None:
    """Every one of the table; the control are those that do no harm with nonsense arguments."""
    worker = make("syscalls")
    column = list(seccomp.ARCHITECTURES).index(platform.machine())
    for name, numbers in {**seccomp.START, **seccomp.REFUSED}.items():
        if (number := numbers[column]) is not None:
            found = worker.call("system_call", 10, number=number, arguments=[-1] * 4)
            assert found == errno.EPERM, name
    clone3 = seccomp.CLONE3[column]
    assert worker.call("system_call", 10, number=clone3, arguments=[0, 0]) == errno.ENOSYS
    clone: dict[str, Any] = {
        "number": seccomp.CLONE[column],
        "arguments": [CLONE_NEWNS | 17, 0, 0, 0, 0],
    }
    assert worker.call("system_call", 10, **clone) == errno.EPERM
    for name in ("ptrace", "personality", "keyctl", "kcmp", "process_vm_readv"):
        tried = control("system_call", number=seccomp.REFUSED[name][column], arguments=[-1] * 4)
        assert tried != errno.EPERM, name


def test_calls_with_the_numbers_of_another_architecture_kill() -> None:
    for machine, token in seccomp.ARCHITECTURES.items():
        steps = seccomp.program(machine, may_start_programs=False)
        assert steps[1] == (seccomp.EQUAL, 1, 0, token)
        assert steps[2] == (seccomp.RETURN, 0, 0, seccomp.KILL)
        assert len(steps) < 4096


def test_the_environment_is_ours_to_choose(
    make: Make, cpu_machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = {"LD_PRELOAD": "", "HF_TOKEN": "secret", "PYTHONSTARTUP": "secret"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    zygote = Zygote.start(warm=False)
    try:
        seen = zygote.spawn(ENTRY, {}, Limits(), "solution").call("who", 60)["environment"]
    finally:
        zygote.close()
    assert not set(secrets) & set(seen)
    assert set(secrets) <= set(os.environ)
    assert seen["HOME"] != os.environ.get("HOME")


# Compilers.


def test_a_builder_compiles_and_writes_only_its_folder(
    cpu_machine: Machine, tmp_path: Path
) -> None:
    work = tmp_path / "build"
    work.mkdir()
    work.chmod(0o777)
    (work / "a.cpp").write_text('extern "C" int two() { return 2; }\n')
    (tmp_path / "secret.h").write_text("int secret;")
    (work / "thief.cpp").write_text(f'#include "{tmp_path}/secret.h"\n')
    config = {"view_write": [str(work)]}
    worker = cpu_machine.zygote.spawn("runtime.command:handlers", config, Limits(), "builder")

    def run(*command: str) -> dict[str, Any]:
        return worker.call("run", 120, command=list(command), cwd=str(work))

    built = run("g++", "-O2", "-shared", "-fPIC", "a.cpp", "-o", "a.so")
    assert built == {"code": 0, "output": ""}
    assert (work / "a.so").stat().st_size > 0
    isolation = worker.call("isolation", 10)["isolation"]
    if isolation["filesystem"]:
        assert "No such file" in run("g++", "-c", "thief.cpp")["output"]
        assert run("sh", "-c", f"echo > {tmp_path}/made")["code"] != 0
        assert not (tmp_path / "made").exists()
    if isolation["syscalls"]:
        assert run("unshare", "-U", "true")["code"] != 0
    printed = run("sh", "-c", "yes | head -c 200000; echo end; exit 3")
    assert printed["code"] == 3
    assert len(printed["output"]) == 64 << 10
    assert printed["output"].endswith("end\n")
    worker.close(wait_s=5)


@pytest.mark.skipif(
    subprocess.run(["sh", "-c", "command -v nvcc"], capture_output=True).returncode != 0,
    reason="no nvcc",
)
def test_a_builder_runs_nvcc(cpu_machine: Machine, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    (tmp_path / "a.cu").write_text("__global__ void k(float* x) { *x = 1; }\n")
    config = {"view_write": [str(tmp_path)]}
    worker = cpu_machine.zygote.spawn("runtime.command:handlers", config, Limits(), "builder")
    command = ["nvcc", "-c", "a.cu", "-o", "a.o"]
    assert worker.call("run", 120, command=command, cwd=str(tmp_path)) == {"code": 0, "output": ""}
    worker.close(wait_s=5)


def test_a_hanging_compiler_ends_with_its_worker(cpu_machine: Machine) -> None:
    worker = cpu_machine.zygote.spawn("runtime.command:handlers", {}, Limits(), "builder")
    worker.send("run", command=["sh", "-c", "sleep 600 & sleep 600"], cwd="/")
    children: list[psutil.Process] = []
    deadline = time.monotonic() + 10
    while len(children) < 2 and time.monotonic() < deadline:
        children = psutil.Process(worker.pid).children(recursive=True)
    with pytest.raises(WorkerError):
        worker.receive(0.1)
    assert children
    assert all(_gone(child) for child in children)


# Machines that give less.

LESS = """
import json, sys
from runtime.sandbox import Limits, RemoteError, Zygote
zygote = Zygote.start(warm=False)
config = json.loads(sys.argv[1])
worker = zygote.spawn("tests.sandbox_entry:handlers", config["config"], Limits(), "solution")
said = {"who": worker.call("who", 60)}
for name, (attempt, params) in config["attempts"].items():
    try:
        said[name] = worker.call(attempt, 30, **params)
    except RemoteError as error:
        said[name] = error.type
reference = zygote.spawn("tests.sandbox_entry:handlers", {}, Limits(), "reference")
said["reference"] = reference.call("who", 60)["isolation"]
zygote.close()
print(json.dumps(said))
"""


def without_admin() -> None:
    """As in a container with default settings: root, but no right to make namespaces."""
    bounding_set_drop, cap_sys_admin = 24, 21
    call("prctl", bounding_set_drop, cap_sys_admin, 0, 0, 0)


def without_root() -> None:
    """As on a laptop: another user, who may make user namespaces and reads what Python needs."""
    call("unshare", CLONE_NEWNS)
    writable = os.environ["OPS6K_TEST"].split(":")
    enter(view_of({"view_write": writable}), 1 << 28, own_processes=True)
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to give it up")
@pytest.mark.parametrize(
    ("lose", "lacks"),
    [
        (without_admin, {"processes", "user", "limits"}),
        (without_root, {"processes", "user"}),
    ],
)
def test_a_machine_that_gives_less_says_so_and_keeps_the_rest(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    open_to_all: Path,
    lose: Callable[[], None],
    lacks: set[str],
) -> None:
    monkeypatch.setenv("OPS6K_TEST", f"{tmp_path}:{open_to_all}")
    scratch, hidden = tmp_path / "scratch", tmp_path / "hidden"
    for folder in (tmp_path, scratch, scratch / "work", hidden):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o777)
    (hidden / "secret").write_text("secret")
    (scratch / "source").write_text("source")
    for parent in tmp_path.parents[:-1]:
        if parent.stat().st_uid == 0 and parent != Path("/tmp"):
            parent.chmod(parent.stat().st_mode | 0o055)
    attempts = {
        "shell": ("shell", {}),
        "network": ("open_socket", {"family": int(socket.AF_INET)}),
        "mount": ("mount", {}),
        "private": ("make", {"path": str(tmp_path / "made")}),
        "outside": ("make", {"path": str(open_to_all / "made")}),
        "secret": ("read", {"path": str(hidden / "secret")}),
        "source": ("read", {"path": str(scratch / "source")}),
        "inside": ("make", {"path": str(scratch / "work" / "made")}),
        "device": ("open_device", {"path": "/dev/full", "write": True}),
        "device read": ("open_device", {"path": "/dev/full", "write": False}),
        "honest": ("honest_work", {"folder": str(scratch / "work")}),
    }
    config = {
        "scratch": str(scratch), "view_hide": [str(hidden)], "view_shut": ["/dev/full"],
    }  # fmt: skip
    told = json.dumps({"config": config, "attempts": attempts})
    done = subprocess.run(
        [sys.executable, "-c", LESS, told],
        capture_output=True, text=True, cwd=ROOT, timeout=120, preexec_fn=lose,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    isolation, why_not = said["who"]["isolation"], said["who"]["why_not"]
    assert {part for part, given in isolation.items() if not given} == lacks, why_not
    assert {"processes", "user"} <= set(why_not)
    assert said["shell"] == said["network"] == said["mount"] == "PermissionError"
    assert said["device"] == said["device read"] == "PermissionError"
    assert said["outside"] in ("PermissionError", "OSError")
    assert not (tmp_path / "made").exists()  # at most in a /tmp of its own
    assert not (open_to_all / "made").exists()
    assert said["secret"] in ("PermissionError", "FileNotFoundError")
    assert said["source"] == "source"
    assert said["inside"] is True
    assert said["honest"] == dict.fromkeys(said["honest"], True)
    assert control("make", path=str(open_to_all / "made"))


def test_every_attempt_is_made_by_a_test() -> None:
    here = (
        Path(__file__).read_text() + Path(__file__).with_name("test_runtime_sandbox.py").read_text()
    )
    assert [name for name in sandbox_entry.ATTEMPTS if f'"{name}"' not in here] == []
