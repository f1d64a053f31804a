"""Running foreign code: a `Zygote` forks confined workers, a `Worker` answers calls in JSON.

Nothing a worker says is trusted further than its caller trusts it: replies are JSON of bounded
size, never pickles, and bulk data travels through files the caller names and sizes.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from runtime.confine import MAX_MESSAGE_BYTES
from runtime.zygote import MAX_REQUEST_BYTES

ROOT = Path(__file__).resolve().parent.parent
# What a child may see of our environment: where programs and libraries are, nothing secret.
ALLOWED_ENVIRONMENT = (
    "PATH", "LANG", "LC_ALL", "TZ", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH",
    "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES",
    "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE",
    "CXX",  # Inductor's compiler, which `verification.building.toolchain` has found
)  # fmt: skip
FORKABLE = {
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""The warm parent forks, so it must start no threads and no CUDA runtime."""
PRELOAD = (
    "torch", "torch._dynamo", "torch._inductor.compile_fx", "torch.utils.flop_counter",
    "torch.utils.cpp_extension",
    "torch._inductor.codegen.triton", "torch._inductor.runtime.triton_heuristics",
    "torch._inductor.kernel.mm", "torch._inductor.kernel.conv",
    "?triton", "?triton.compiler", "?triton.backends.nvidia.compiler",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a worker may use."""

    memory_gib: float = 8.0
    """Resident memory; a worker above it is killed."""
    address_space_gib: float | None = None
    """Virtual memory. None on a GPU machine: the driver reserves terabytes of addresses."""
    file_gib: float = 16.0
    """Largest file it may write."""
    processes: int = 4096
    """Processes and threads of the unprivileged user."""
    open_files: int = 4096
    temporary_gib: float = 1.0
    """What each private folder holds: /tmp, /var/tmp, /dev/shm and the work folder, in memory."""


PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
ROLES = ("reference", "solution", "builder")
NO_MEMORY = ("can't allocate memory", "out of memory", "alloc_failed")


class WorkerError(Exception):
    """A worker did not answer as asked. `kind` is one word for a verdict's status."""

    kind = "crash"


class ParentGone(Exception):
    """The warm parent died or was never there.

    That says nothing about any problem or solution, so it is no WorkerError: nothing may be
    concluded from it, and nothing stored.
    """


class WorkerTimeout(WorkerError):
    kind = "timeout"


class WorkerOutOfMemory(WorkerError):
    kind = "out_of_memory"


class WorkerCrash(WorkerError):
    kind = "crash"


class RemoteError(WorkerError):
    """The call raised in the worker, which lives on."""

    kind = "runtime_error"

    def __init__(self, description: dict[str, Any]) -> None:
        self.type = str(description.get("type"))
        self.message = str(description.get("message"))
        self.trace = str(description.get("trace"))
        text = self.message.lower()
        if self.type in ("OutOfMemoryError", "MemoryError") or any(t in text for t in NO_MEMORY):
            self.kind = "out_of_memory"
        super().__init__(f"{self.type}: {self.message}")


class Zygote:
    """A connection to a warm parent, and with `start` the warm parent itself.

    Starting one takes seconds, a worker milliseconds. Others `connect` to its `address` and
    share it; their workers are their own. It ends with whoever started it.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._started: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_REQUEST_BYTES)
        self._turn = threading.Lock()

    @staticmethod
    def connect(address: str) -> Zygote:
        """Share the warm parent at `address`. Raises ParentGone when there is none."""
        zygote = Zygote(address)
        try:
            zygote._control.connect(address)
        except OSError as error:
            raise ParentGone(f"no warm parent at {address}: {error}") from error
        return zygote

    @staticmethod
    def start(
        preload: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        warm: bool = True,
    ) -> Zygote:
        """Start a warm parent and connect to it; it may still be warming up then.

        `preload`: modules to import before any fork, those marked with ? where they exist.
        `warm`: compile something before any fork, so that a child's first torch.compile is fast.
        """
        folder = tempfile.mkdtemp(prefix=f"ops6k-{os.getpid()}-")
        address = os.path.join(folder, "zygote")
        ours, theirs = socket.socketpair()
        kept = {k: os.environ[k] for k in ALLOWED_ENVIRONMENT if k in os.environ}
        kept |= {"HOME": "/tmp", **FORKABLE, **(environment or {})}
        process = subprocess.Popen(
            [
                sys.executable,
                *("-W", "ignore:This process:DeprecationWarning"),  # it forks, and knows how
                *("-m", "runtime.zygote", str(theirs.fileno()), address),
                *("warm" if warm else "cool", *PRELOAD, *preload),
            ],
            pass_fds=[theirs.fileno()],
            env=kept,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        while not os.path.exists(address):
            if process.poll() is not None:
                raise ParentGone(
                    f"the warm parent did not start (exit code {process.returncode}); "
                    "its own message is on stderr"
                )
            time.sleep(0.01)
        zygote = Zygote.connect(address)
        zygote._started = (process, ours)
        return zygote

    def spawn(self, entry: str, config: dict[str, Any], limits: Limits, role: str) -> Worker:
        """Fork a worker that runs `entry` ("module:function"), which returns its handlers.

        `role` is "reference" (keeps our user, may write our caches), "solution" (loses both) or
        "builder" (loses both, may start programs); see `runtime.confine`. What the worker prints
        goes to the file `config["log"]`, or nowhere without one. Which folders the last two see
        and may write is in `config` too, see `runtime.view.view_of`, and so are variables of its
        environment, in `config["environment"]`. Raises ValueError for another role.
        """
        if role not in ROLES:
            raise ValueError(f"expected a role out of {', '.join(ROLES)}, got {role!r}")
        ours, theirs = socket.socketpair()
        request = {
            "entry": entry,
            "config": config,
            "limits": asdict(limits),
            "role": role,
            "hide": [os.path.expanduser("~")],
        }
        reply = self._ask(request, [theirs.fileno()])
        theirs.close()
        return Worker(self, reply["pid"], ours, limits)

    def exit_code(self, pid: int) -> int | None:
        return self._ask({"status": pid})["status"]

    def _ask(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        try:
            with self._turn:  # a build of its own thread asks too
                socket.send_fds(self._control, [json.dumps(request).encode()], list(descriptors))
                reply = self._control.recv(1 << 16)
        except OSError as error:
            raise ParentGone(f"the warm parent is gone: {error}") from error
        if not reply:
            raise ParentGone("the warm parent is gone; its own message is on stderr")
        return json.loads(reply)

    def close(self) -> None:
        """End our workers, and the warm parent with all of them if we started it."""
        self._control.close()
        if self._started is not None:
            process, owner = self._started
            owner.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.kill()
            process.wait()
            shutil.rmtree(os.path.dirname(self.address), ignore_errors=True)
            self._started = None


class Worker:
    """One confined child process."""

    def __init__(self, zygote: Zygote, pid: int, channel: socket.socket, limits: Limits) -> None:
        self.pid = pid
        self._zygote = zygote
        self._channel = channel
        self._limits = limits
        self._buffer = b""
        self._closed = False

    def call(self, method: str, timeout_s: float, spin_s: float = 0.0, **params: Any) -> Any:
        """Call a handler. Raises a WorkerError; after any but RemoteError the worker is gone.

        `spin_s`: so long the answer is waited for without sleeping, because waking up takes long
        compared with what is timed.
        """
        self.send(method, **params)
        return self.receive(timeout_s, spin_s)

    def send(self, method: str, **params: Any) -> None:
        message = json.dumps({"method": method, "params": params}).encode() + b"\n"
        try:
            self._channel.sendall(message)
        except OSError:
            raise self._died() from None

    def receive(self, timeout_s: float, spin_s: float = 0.0) -> Any:
        awake = time.monotonic() + spin_s
        while spin_s and time.monotonic() < awake:
            if select.select([self._channel], [], [], 0)[0]:
                break
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            if not select.select([self._channel], [], [], 0.05)[0]:
                self._check(deadline, timeout_s)
                continue
            try:
                data = self._channel.recv(1 << 20)
            except OSError:
                data = b""
            if not data:
                raise self._died()
            self._buffer += data
            if len(self._buffer) > MAX_MESSAGE_BYTES:
                self.close()
                raise WorkerCrash(f"a reply of over {MAX_MESSAGE_BYTES} bytes")
        line, self._buffer = self._buffer.split(b"\n", 1)
        try:
            reply = json.loads(line)
            if "error" in reply:
                raise RemoteError(reply["error"])
            return reply["result"]
        except (ValueError, KeyError, TypeError) as error:
            self.close()
            raise WorkerCrash(f"a reply that is not ours: {line[:200]!r}") from error

    def _check(self, deadline: float, timeout_s: float) -> None:
        if time.monotonic() > deadline:
            self.close()
            raise WorkerTimeout(f"no answer within {timeout_s:g} s")
        resident = resident_bytes(self.pid)
        if resident > self._limits.memory_gib * 2**30:
            self.close()
            raise WorkerOutOfMemory(
                f"{resident / 2**30:.1f} GiB resident, limit {self._limits.memory_gib:g} GiB"
            )

    def _died(self) -> WorkerError:
        try:
            code = self._zygote.exit_code(self.pid)
        finally:
            self.close()
        if code is not None and code < 0:
            return WorkerCrash(f"killed by {signal.Signals(-code).name}")
        return WorkerCrash(f"exited with code {code}")

    def close(self, wait_s: float = 0.0) -> None:
        """Kill the worker and whatever it started: what is in its process group, and where it has
        a PID namespace all that is in there.

        `wait_s`: how long to wait until it is really gone. A process with gigabytes or a GPU
        context takes a moment to die, and would disturb a timing meanwhile.
        """
        if not self._closed:
            self._closed = True
            self._channel.close()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        deadline = time.monotonic() + wait_s
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            while process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
                time.sleep(0.005)


def resident_bytes(pid: int) -> int:
    """Resident memory of a process and all it has started; pages they share count for each.

    0 when it has gone. Not covered: what leaves its family, where there is no PID namespace.
    """
    total = 0
    with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/statm") as file:
            total = int(file.read().split()[1]) * PAGE_BYTES
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                total += sum(resident_bytes(int(child)) for child in file.read().split())
    return total
