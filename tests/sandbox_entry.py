"""Attempts to get out of the sandbox, or to misbehave in it, one function each.

A worker has them as handlers. `python -m tests.sandbox_entry NAME JSON` makes the same attempt in
a process that nothing confines, which is the control.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from runtime import linux

# Ways to die.


def boom() -> None:
    raise ValueError("boom")


def die() -> None:
    """A real fault: the first process of a PID namespace does not hear signals of its own."""
    ctypes.string_at(0)


def eat(mib: int = 1 << 20) -> int:
    hoard = []
    for _ in range(0, mib, 64):
        hoard.append(bytearray(b"x") * (64 << 20))
        time.sleep(0.01)
    return len(hoard)


def eat_in_a_child(mib: int = 1 << 20) -> int:
    pid = os.fork()
    if pid == 0:
        os.setsid()
        eat(mib)
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def shout() -> None:
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, b"PASS\n")
        except OSError:
            continue


# The network.


def connect(host: str = "192.0.2.1", port: int = 80) -> bool:
    with socket.socket() as plain:
        plain.settimeout(2)
        plain.connect((host, port))
    return True


def ask_for_a_worker(address: str, leave_first: bool) -> str:
    """Connect to the warm parent, as a child or as a daemon that has left its family."""
    if leave_first and os.fork() > 0:
        time.sleep(0.5)
        with open(f"{address}.answer") as file:
            return file.read()
    if leave_first:
        os.setsid()
        if os.fork() > 0:
            os._exit(0)
        time.sleep(0.1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as control:
        control.connect(address)
        try:
            control.send(b'{"status": 1}')
            answer = control.recv(1000).decode()
        except OSError as error:
            answer = type(error).__name__
    if leave_first:
        with open(f"{address}.answer", "w") as file:
            file.write(answer)
        os._exit(0)
    return answer


# Files.


def fill(path: str, mib: int = 4) -> int:
    with open(path, "wb", buffering=0) as file:
        for _ in range(mib):
            if file.write(b"x" * (1 << 20)) != 1 << 20:
                raise OSError("written in part only")
    return os.path.getsize(path)


def make(path: str) -> bool:
    Path(path).write_text("mine")
    return True


def read(path: str) -> str:
    return Path(path).read_text()


def overwrite(path: str, text: str) -> bool:
    with open(path, "r+") as file:
        file.write(text)
    return True


def open_device(path: str, write: bool) -> bool:
    os.close(os.open(path, os.O_RDWR if write else os.O_RDONLY))
    return True


def count_gpus(shown: str) -> int:
    """How many the driver gives when it starts with another $CUDA_VISIBLE_DEVICES than ours."""
    no_device = 100
    os.environ["CUDA_VISIBLE_DEVICES"] = shown
    driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    for status in (driver.cuInit(0), driver.cuDeviceGetCount(ctypes.byref(count))):
        if status == no_device:
            return 0
        if status != 0:
            raise OSError(f"the driver says {status}")
    return count.value


def remove(path: str) -> bool:
    os.unlink(path)
    return True


def truncate(path: str) -> bool:
    with open(path, "r+") as file:
        file.truncate(1)
    return True


def punch(path: str) -> bool:
    """Take the pages out of a file."""
    with open(path, "r+") as file:
        keep_size, punch_hole = 1, 2
        linux.call("fallocate", file.fileno(), keep_size | punch_hole, 0, 4096)
    return True


def punch_mapped(path: str) -> bool:
    """The same, through a mapping."""
    with open(path, "r+") as file, mmap.mmap(file.fileno(), 4096) as mapped:
        mapped.madvise(mmap.MADV_REMOVE)
    return True


def map_shared(path: str) -> bool:
    """As `verification.workers.transport` writes on a GPU."""
    import torch

    torch.from_file(path, shared=True, size=8192, dtype=torch.uint8)[0] = ord("m")
    return True


def mount() -> bool:
    """In a namespace of our own, so that nobody else sees it."""
    linux.call("unshare", linux.CLONE_NEWNS)
    linux.call("mount", None, b"/", None, (1 << 14) | (1 << 18), None)
    linux.call("mount", b"none", b"/var/tmp", b"tmpfs", 0, None)
    return True


def become_root_somewhere() -> bool:
    linux.call("unshare", linux.CLONE_NEWUSER)
    return True


def many_files(count: int) -> int:
    return len([os.open("/dev/null", os.O_RDONLY) for _ in range(count)])


# Other processes.


def processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def signal_to(pid: int) -> bool:
    os.kill(pid, 0)
    return True


def attach(pid: int) -> bool:
    """By PTRACE_SEIZE, which does not stop it."""
    linux.call("ptrace", 0x4206, pid, 0, 0)
    return True


def peek(pid: int) -> bool:
    """The memory of another process, through /proc."""
    with open(f"/proc/{pid}/maps") as file:
        start = int(file.readline().split("-")[0], 16)
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as file:
        file.seek(start)
        return len(file.read(16)) == 16


def shell() -> str:
    return subprocess.run(["/bin/sh", "-c", "echo out"], capture_output=True, text=True).stdout


def fork_sleeper() -> int:
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
        os._exit(0)
    return pid


def daemon(path: str | None = None) -> bool:
    """A process that has left its session and its parent; it writes its id to `path`."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 3)
            if path is not None:
                Path(path).write_text(str(os.getpid()))
            time.sleep(600)
        os._exit(0)
    os.wait()
    return True


def fork_many(count: int) -> int:
    """How many children there can be at once."""
    children = []
    with contextlib.suppress(BlockingIOError):
        for _ in range(count):
            pid = os.fork()
            if pid == 0:
                signal.pause()
            children.append(pid)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return len(children)


# Limits and the kernel.


def raise_limits() -> bool:
    unlimited = resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))
    return True


def system_call(number: int, arguments: list[int]) -> int:
    """Its error number; 0 when it worked."""
    try:
        linux.call("syscall", number, *arguments)
    except OSError as error:
        return error.errno or -1
    return 0


def open_socket(family: int) -> bool:
    socket.socket(family, socket.SOCK_STREAM).close()
    return True


# What honest code does.


def honest_work(folder: str) -> dict[str, bool]:
    """Threads, plain forks, files, anonymous memory, local sockets and torch on all cores."""
    import torch

    done: list[int] = []
    thread = threading.Thread(target=lambda: done.append(1))
    thread.start()
    thread.join()
    pid = os.fork()
    if pid == 0:
        os._exit(3)
    one, other = socket.socketpair()
    one.send(b"x")
    path = Path(folder) / "mine"
    path.write_text("mine")
    path.rename(path.with_name("renamed"))
    memory = os.memfd_create("mine")
    os.truncate(memory, 4096)
    torch.set_num_threads(2)
    square = torch.randn(512, 512)
    return {
        "thread": done == [1],
        "fork": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3,
        "socket": other.recv(1) == b"x",
        "file": path.with_name("renamed").read_text() == "mine",
        "memory": mmap.mmap(memory, 4096)[:1] == b"\0",
        "event": os.eventfd(0) > 0,
        "torch": bool(torch.isfinite(square @ square).all()),
        "name": Path("/proc/self/comm").read_text() != "",
    }


ATTEMPTS = {
    name: function
    for name, function in list(globals().items())
    if callable(function) and getattr(function, "__module__", "") == __name__
}


def handlers(config: dict[str, Any], isolation: dict[str, bool]) -> dict[str, Any]:
    return {
        "who": lambda: {
            "uid": os.getuid(),
            "nice": os.nice(0),
            "isolation": isolation,
            "why_not": config["why_not"],
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "mail": config.get("mail"),
        },
        "ping": lambda: 1,
        "length": lambda: len(config["code"]),
        "interfaces": lambda: [name for _, name in socket.if_nameindex()],
        "leave": lambda: os._exit(0),
        "hang": lambda: time.sleep(600),
        **ATTEMPTS,
    }


if __name__ == "__main__":
    print(json.dumps(ATTEMPTS[sys.argv[1]](**json.loads(sys.argv[2]))))
