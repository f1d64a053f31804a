"""Built files by content key, bounded in size and safe under concurrent use.

An entry is a folder `ROOT/KEY`. It is written elsewhere and renamed, so a reader sees all of it or
nothing. When entries take more than the limit, those that were least recently asked for are renamed
away and then deleted; never one that was asked for in the last `grace_s` seconds, which is what a
caller has to open or copy what it was given. Asking and renaming away exclude each other through a
lock on ROOT itself. Not covered: file systems without `flock` (some network ones).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

LIMIT_BYTES = 10 << 30
GRACE_S = 600.0
LEFTOVER_S = 86400.0
"""Age at which a folder of a process that was killed while it wrote is removed."""
ENTRY_NAME_LENGTH = 32


class BuildCache:
    """Folders by content key."""

    _looked: dict[Path, float] = {}  # noqa: RUF012 - when this process last measured each root

    def __init__(
        self,
        root: Path,
        limit_bytes: int = LIMIT_BYTES,
        grace_s: float = GRACE_S,
        every_s: float = 60.0,
    ) -> None:
        self.root = root
        self._limit_bytes = limit_bytes
        self._grace_s = grace_s
        self._every_s = every_s

    def find(self, key: str, member: str) -> Path | None:
        """The folder of an entry that holds the file `member`, or None. It counts as used now."""
        entry = self.root / key
        with self._locked(fcntl.LOCK_SH):
            if not (entry / member).exists():
                return None
            with contextlib.suppress(PermissionError):  # another user's, who touches it himself
                os.utime(entry)
            return entry

    def keep(self, key: str, files: dict[str, Path], member: str) -> Path:
        """Copy `files` (name in the entry -> file) into an entry and return its folder.

        An entry that is there already is returned as it is, unless it lacks `member`. Only plain
        files are copied, because a builder may have left something else: ValueError.
        """
        work = self.root / f"{key}.{uuid.uuid4().hex}.tmp"
        try:
            for name, source in files.items():
                destination = work / name
                destination.parent.mkdir(parents=True, exist_ok=True)
                _copy(source, destination)
            with self._locked(fcntl.LOCK_EX):
                entry = self.root / key
                if not (entry / member).exists():
                    if entry.exists():
                        os.rename(entry, self._leaving(entry))
                    os.rename(work, entry)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        self._trim_sometimes()
        return entry

    def trim(self) -> int:
        """Remove what is above the limit, and leftovers; the number of entries removed."""
        self._remove_leftovers()
        entries = sorted(_measured(self.root), key=lambda found: found[0])
        excess = sum(size for _, size, _ in entries) - self._limit_bytes
        removed = 0
        for used, size, entry in entries:
            if excess <= 0 or used > time.time() - self._grace_s:
                break
            leaving = self._leaving(entry)
            with self._locked(fcntl.LOCK_EX):
                try:
                    if entry.stat().st_mtime != used:
                        continue  # somebody has just got it
                    os.rename(entry, leaving)
                except FileNotFoundError:
                    continue
            shutil.rmtree(leaving, ignore_errors=True)
            excess -= size
            removed += 1
        return removed

    def _trim_sometimes(self) -> None:
        now = time.monotonic()
        if now - self._looked.get(self.root, -1e9) >= self._every_s:
            self._looked[self.root] = now
            self.trim()

    def _remove_leftovers(self) -> None:
        for pattern in ("*.tmp", "*.gone"):
            for left in self.root.glob(pattern):
                with contextlib.suppress(FileNotFoundError):
                    if left.stat().st_mtime < time.time() - LEFTOVER_S:
                        shutil.rmtree(left, ignore_errors=True)

    def _leaving(self, entry: Path) -> Path:
        return entry.with_name(f"{entry.name}.{uuid.uuid4().hex}.gone")

    @contextlib.contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        """The lock goes with its descriptor, so a killed process leaves none behind."""
        handle = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, how)
            yield
        finally:
            os.close(handle)


def _copy(source: Path, destination: Path) -> None:
    handle = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(handle, "rb") as reader:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError(f"expected a plain file, got {source}")
        with open(destination, "wb") as writer:
            shutil.copyfileobj(reader, writer, 1 << 20)


def _measured(root: Path) -> Iterator[tuple[float, int, Path]]:
    """(when last used, bytes, folder) of every entry."""
    for entry in root.iterdir():
        if len(entry.name) != ENTRY_NAME_LENGTH:
            continue
        with contextlib.suppress(FileNotFoundError):
            used = entry.stat().st_mtime
            size = sum(file.stat().st_size for file in entry.rglob("*") if file.is_file())
            yield used, size, entry
