"""Where the CPU time of a process goes, seen from outside of it: instruction pointers by file.

The judge has the kernel sample the threads of a solution's process (perf_event_open, a software
clock, user mode only) and looks up each address in /proc/PID/maps. Threads and processes that these
start meanwhile are sampled too; an address of another process is looked up in the maps of this one.
Nothing runs in that process, so it cannot lie about this, but it can hide: in a process that it has
started before, or in a loop of its own that does nothing useful while a library computes
elsewhere. `coverage` shows when time is missing. A sample costs a few microseconds of the thread
it interrupts, so sample all sides of a comparison or none.

    with Sampler(pid) as sampler:
        ...calls...
    report = sampler.report()            None where the kernel refuses; sampler.refused says why
    own, foreign = shares(report, library)
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import platform
import struct
import sys
from bisect import bisect_right
from collections import Counter
from pathlib import Path
from types import TracebackType

FREQUENCY = 1997
"""Samples a second of a running thread; a prime, so as not to beat with anything periodic."""
RING_PAGES = 16
"""Of each CPU: 2,700 samples. Later ones are lost, and counted in `lost`."""
UNKNOWN = "[unknown]"
_SYSCALL = {"x86_64": 298, "aarch64": 241}
_SOFTWARE, _CPU_CLOCK = 1, 0
_IP, _TID = 1, 2
_DISABLED, _INHERIT, _EXCLUDE_KERNEL, _EXCLUDE_HV, _FREQUENCY = 1, 2, 1 << 5, 1 << 6, 1 << 10
_ATTRIBUTES = struct.Struct("<IIQQQQQIIQ")
_ENABLE, _DISABLE, _SET_OUTPUT = 0x2400, 0x2401, 0x2405
_LOST, _SAMPLE = 2, 9
_HEADER = struct.Struct("<IHH")
_NEUTRAL = (
    *("libc.so", "libc-", "libm.so", "libm-", "libmvec", "libpthread", "libdl", "librt"),
    *("ld-linux", "ld-", "libstdc++", "libgcc_s", "libgomp", "libomp", "libiomp"),
    *("python", "libpython", "libffi", "_ctypes"),
)
"""Names of what serves everybody: C and C++ runtimes, thread pools, the interpreter."""


class Sampler:
    """Samples process `pid` and all it starts inside the blocks, which add up.

    `lost`: samples for which there was no room. `cpu_s`: user CPU time of the whole process
    inside the blocks, in seconds.
    """

    def __init__(self, pid: int, frequency: int = FREQUENCY) -> None:
        self._pid = pid
        self._frequency = frequency
        self._rings: dict[int, _Ring] = {}
        """By CPU: an event that is inherited can only write to the ring of one."""
        self._found: Counter[str] = Counter()
        self._cpu_before = 0.0
        self.refused = ""
        self.lost = 0
        self.cpu_s = 0.0

    def __enter__(self) -> Sampler:
        try:
            for tid in os.listdir(f"/proc/{self._pid}/task"):
                self._open(int(tid))
            self._cpu_before = _user_s(self._pid)
        except OSError as error:
            self.refused = _why(error, self._pid)
        if self.refused:
            self._close()
        for ring in self._rings.values():
            ring.switch(_ENABLE)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for ring in self._rings.values():
            ring.switch(_DISABLE)
        try:
            if not self.refused:
                self._collect()
        except OSError as gone:
            self.refused = _why(gone, self._pid)
        finally:
            self._close()

    def report(self) -> dict[str, int] | None:
        """Samples by file; None where sampling was refused, see `refused`."""
        return None if self.refused else dict(self._found)

    def coverage(self) -> float | None:
        """Sampled time over CPU time; well below 1 when threads came later or samples were lost.

        None when that is not known: refused, or less than a tenth of a second of CPU time.
        """
        if self.refused or self.cpu_s < 0.1:
            return None
        return self._found.total() / self._frequency / self.cpu_s

    def _open(self, tid: int) -> None:
        for cpu in os.sched_getaffinity(0):
            with contextlib.suppress(ProcessLookupError):  # a thread that ended meanwhile
                self._rings.setdefault(cpu, _Ring(cpu)).add(tid, self._frequency)

    def _collect(self) -> None:
        files = _Maps(self._pid)
        self.cpu_s += _user_s(self._pid) - self._cpu_before
        for ring in self._rings.values():
            addresses, lost = ring.read()
            self.lost += lost
            self._found.update(files.file_of(address) for address in addresses)

    def _close(self) -> None:
        for ring in self._rings.values():
            ring.close()
        self._rings = {}


def shares(report: dict[str, int], own: Path) -> tuple[float, float]:
    """The shares of all samples, 0 to 1, in the solution's own library and in foreign code.

    Neither are the C and C++ runtimes, thread pools and the interpreter, as far as they lie where
    a solution cannot write. Anything else is foreign: libtorch, BLAS, code made at run time.
    (0, 0) for no samples. Threads of a pool that wait spin in libgomp: on a busy machine that can
    be most samples, so compare the two shares with each other.
    """
    total = sum(report.values())
    if total == 0:
        return 0.0, 0.0
    ours = {str(own), str(own.resolve())}
    in_own = sum(count for file, count in report.items() if file in ours)
    neutral = sum(count for file, count in report.items() if file not in ours and _neutral(file))
    return in_own / total, (total - in_own - neutral) / total


def _neutral(file: str) -> bool:
    if file in ("[vdso]", "[vsyscall]"):
        return True
    fixed = ("/usr/", "/lib/", "/lib64/", f"{sys.prefix}/", f"{sys.base_prefix}/")
    name = os.path.basename(file)
    return file.startswith(fixed) and (name.startswith(_NEUTRAL) or "/lib-dynload/" in file)


class _Ring:
    """What happens on one CPU: an event a thread, and the memory that the kernel writes to."""

    def __init__(self, cpu: int) -> None:
        self._cpu = cpu
        self._files: list[int] = []
        self._memory: mmap.mmap | None = None

    def add(self, tid: int, frequency: int) -> None:
        """A thread, and those that it will start. Raises OSError."""
        flags = _DISABLED | _INHERIT | _EXCLUDE_KERNEL | _EXCLUDE_HV | _FREQUENCY
        attributes = _ATTRIBUTES.pack(
            _SOFTWARE, _ATTRIBUTES.size, _CPU_CLOCK, frequency, _IP | _TID, 0, flags, 0, 0, 0
        )
        self._files.append(_perf_event_open(attributes, tid, self._cpu))
        if self._memory is None:
            self._memory = mmap.mmap(self._files[-1], (1 + RING_PAGES) * mmap.PAGESIZE)
        else:
            fcntl.ioctl(self._files[-1], _SET_OUTPUT, self._files[0])

    def switch(self, request: int) -> None:
        for file in self._files:
            fcntl.ioctl(file, request, 0)

    def read(self) -> tuple[list[int], int]:
        """(instruction pointers, samples lost). Once, with the events disabled."""
        if self._memory is None:
            return [], 0
        head = struct.unpack_from("<Q", self._memory, 1024)[0]
        addresses, lost, position = [], 0, 0
        while position + _HEADER.size <= head:
            # The kernel never writes over what was not read, so nothing wraps around.
            start = mmap.PAGESIZE + position
            kind, _, size = _HEADER.unpack_from(self._memory, start)
            if kind == _SAMPLE:
                addresses.append(struct.unpack_from("<Q", self._memory, start + 8)[0])
            elif kind == _LOST:
                lost += struct.unpack_from("<Q", self._memory, start + 16)[0]
            position += max(size, _HEADER.size)
        return addresses, lost

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
        for file in self._files:
            os.close(file)


class _Maps:
    """Executable mappings of a process."""

    def __init__(self, pid: int) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._files: list[str] = []
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            span, mode, _, _, _, *name = line.split(maxsplit=5)
            if "x" in mode:
                start, end = (int(edge, 16) for edge in span.split("-"))
                self._starts.append(start)
                self._ends.append(end)
                self._files.append(name[0] if name else UNKNOWN)

    def file_of(self, address: int) -> str:
        index = bisect_right(self._starts, address) - 1
        if index < 0 or address >= self._ends[index]:
            return UNKNOWN
        return self._files[index]


def _perf_event_open(attributes: bytes, tid: int, cpu: int) -> int:
    number = _SYSCALL.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"no perf_event_open known for {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_long(number), attributes, ctypes.c_int(tid), ctypes.c_int(cpu))
    file = libc.syscall(*arguments, ctypes.c_int(-1), ctypes.c_ulong(8))  # close on exec
    if file < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return file


def _user_s(pid: int) -> float:
    """User CPU seconds of a process, those of threads that have ended included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) / os.sysconf("SC_CLK_TCK")


def _why(error: OSError, pid: int) -> str:
    if error.errno in (errno.EACCES, errno.EPERM):
        level = Path("/proc/sys/kernel/perf_event_paranoid")
        found = level.read_text().strip() if level.exists() else "unknown"
        return (
            f"the kernel does not let us sample process {pid} ({error.strerror}; "
            f"kernel.perf_event_paranoid is {found}): needs root, the same user with at most 2, "
            "and a container that allows perf_event_open"
        )
    return f"process {pid} cannot be sampled: {error}"
