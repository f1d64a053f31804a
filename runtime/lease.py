"""Who may use a device, across all processes of a machine.

`exclusive` is held by a timing: nobody else runs on the device meanwhile. `shared` is held by work
whose time does not matter but which would disturb a timing: correctness runs on a GPU, builds and
compile checks on the CPU that is itself being measured. Both are `flock`s, so a killed holder frees
them.

Not covered: programs that do not ask (another user's job). The A/A control of a verdict is what
notices those.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import IO

from runtime import rowlog

OPENINGS = 4
"""How many processes may make a context of a device at once. Alone one takes 0.2 s on an H200, four
at once 0.6 s, twelve 1.6 s. With sixteen verifiers and one at a time a verdict of 11 s had waited
6.5 s for that."""
LOOK_S = 0.02


def physical_name(device: str) -> str:
    """What every process of this machine calls a device, whichever GPUs it has been shown.

    "cuda:0" under CUDA_VISIBLE_DEVICES=3 is "cuda-3". Not covered: one process that is shown GPUs
    by number and another by UUID.
    """
    kind, _, index = device.partition(":")
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if kind != "cuda" or not shown:
        return device.replace(":", "-")
    names = [name.strip() for name in shown.split(",")]
    return f"cuda-{names[int(index or 0)]}"


class DeviceLease:
    """A readers-writer lock on one device that prefers writers.

    Writers hold the turnstile together, from the moment they ask; a reader needs it for itself for
    an instant. So readers which come later queue behind a waiting writer, and writers that come
    meanwhile take their turns in one go: emptying the room once serves them all. Readers cannot
    starve, because whoever times has to build, load and check before it asks again.
    """

    def __init__(self, device_id: str, log: str | None = None, folder: str | None = None) -> None:
        """`log`: gets a line per exclusive hold: start, seconds held, seconds waited, device."""
        root = folder or os.path.join(tempfile.gettempdir(), f"ops6k-lease-{os.getuid()}")
        os.makedirs(root, mode=0o700, exist_ok=True)
        name = "".join(c if c.isalnum() or c in "-." else "_" for c in device_id)
        self._turnstile = os.path.join(root, f"{name}.turnstile")
        self._room = os.path.join(root, f"{name}.room")
        self._doors = [os.path.join(root, f"{name}.door{index}") for index in range(OPENINGS)]
        self._log, self._name = log, name

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        asked = time.time()
        with _locked(self._turnstile, fcntl.LOCK_SH), _locked(self._room, fcntl.LOCK_EX):
            started = time.time()
            try:
                yield
            finally:
                if self._log is not None:
                    held_s, waited_s = time.time() - started, started - asked
                    rowlog.append(self._log, started, held_s, waited_s, self._name)

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        with _locked(self._turnstile, fcntl.LOCK_EX):
            room = os.open(self._room, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(room, fcntl.LOCK_SH)
        try:
            yield
        finally:
            os.close(room)

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Shared, and a few at a time: around the making of a device context.

        Sixteen at once would each keep whoever waits to time waiting for seconds. Not beside a
        timing: the lock the driver holds meanwhile can stop a timed call for a tenth of a second
        (benchmarks/opening.py).
        """
        with _any_locked(self._doors), self.shared():
            yield


@contextlib.contextmanager
def _any_locked(paths: Sequence[str]) -> Iterator[None]:
    """Whichever is free, looking again and again: there is no waiting for one of several files."""
    while (taken := next(filter(None, map(_if_free, paths)), None)) is None:
        time.sleep(LOOK_S)
    with taken:
        yield


def _if_free(path: str) -> IO[bytes] | None:
    """A file, open and locked until it is closed."""
    file = open(path, "ab", buffering=0)  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


@contextlib.contextmanager
def _locked(path: str, mode: int) -> Iterator[None]:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, mode)
        yield
    finally:
        os.close(handle)


def holds(log: str, since: float = 0.0) -> dict[str, list[tuple[float, float, float]]]:
    """By device, its exclusive holds since a moment (seconds since the epoch): when each started,
    seconds held, seconds waited before."""
    found: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for start, held_s, waited_s, device in rowlog.rows(log, float, float, float, str):
        if start >= since:
            found[device].append((start, held_s, waited_s))
    return found


def held_seconds(log: str, since: float = 0.0) -> float:
    """Seconds of exclusive lease a device since a moment, the mean over the devices in `log`."""
    found = holds(log, since)
    return sum(held_s for rows in found.values() for _, held_s, _ in rows) / max(1, len(found))
