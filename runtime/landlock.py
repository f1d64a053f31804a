"""Landlock: which files a process may write, and where there is no view of its own also read.

Needs no privilege. Rules are about what a path leads to when they are made. Constants and the
meaning of each version (ABI): https://docs.kernel.org/userspace-api/landlock.html

Not covered: looking at names and attributes (stat), changing modes and owners, extended attributes:
users and read-only mounts rule these.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from runtime.linux import syscall
from runtime.view import is_below

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
CREATE_RULESET_VERSION, RULE_PATH_BENEATH = 1, 1

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
CHANGES = sum(1 << bit for bit in range(4, 13))
"""Removing files and folders, making files, folders, links, pipes, sockets and devices."""
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
READ = EXECUTE | READ_FILE | READ_DIR
OF_A_FILE = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
TCP = 0b11
"""Binding and connecting."""
OUTSIDE = 0b11
"""Abstract sockets and signals of processes that are not confined with us."""
ENOUGH = 3
"""The first version that rules cutting files short."""
DEVICES = (
    "null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts",
    "nvidia*", "dri", "dxg",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Paths by what is allowed at and below them."""

    write: tuple[str, ...]
    fill: tuple[str, ...] = ()
    """Files may be written, but neither made, removed nor cut short."""
    read: tuple[str, ...] | None = None
    """None: reading is not ruled."""
    shut: tuple[str, ...] = ()
    """Of the device files that all may use, those that this process may not."""


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def version() -> int:
    """The kernel's ABI version; 0 where there is no Landlock."""
    with contextlib.suppress(OSError):
        return syscall("landlock_create_ruleset", CREATE_RULESET, None, 0, CREATE_RULESET_VERSION)
    return 0


def restrict(rules: Rules, abi: int) -> None:
    """Hold this process and all it starts to `rules`; it has set no_new_privs. Raises OSError."""
    writing = WRITE_FILE | CHANGES
    writing |= (REFER if abi >= 2 else 0) | (TRUNCATE if abi >= 3 else 0)
    writing |= IOCTL_DEV if abi >= 5 else 0
    handled = writing | (0 if rules.read is None else READ)
    ruleset = _Ruleset(handled, TCP, OUTSIDE)
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    handle = syscall("landlock_create_ruleset", CREATE_RULESET, ruleset, size, 0)
    try:
        for path in rules.write:
            _allow(handle, path, (writing & ~IOCTL_DEV) | (handled & READ))
        for path in rules.fill:
            _allow(handle, path, WRITE_FILE | (handled & READ))
        for path in _devices():
            if path in rules.shut:
                continue
            _allow(handle, path, handled & (OF_A_FILE | READ_DIR))
        for path in rules.read or ():
            _allow(handle, path, READ)
        syscall("landlock_restrict_self", RESTRICT_SELF, handle, 0)
    finally:
        os.close(handle)


def _devices() -> Iterator[str]:
    for name in DEVICES:
        yield from glob.glob(f"/dev/{name}")


def _allow(handle: int, path: str, rights: int) -> None:
    try:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:  # it has gone since it was listed, and nobody needs a rule for it
        return
    try:
        if not stat.S_ISDIR(os.fstat(parent).st_mode):
            rights &= OF_A_FILE
        rule = _PathBeneath(rights, parent)
        syscall("landlock_add_rule", ADD_RULE, handle, RULE_PATH_BENEATH, rule, 0)
    finally:
        os.close(parent)


def readable(hidden: Iterable[str], shown: Iterable[str]) -> tuple[str, ...]:
    """Rules that allow to read everything but `hidden` folders, and `shown` ones even there.

    Landlock only knows what is allowed, so these are the siblings of what is hidden, all the way
    up. What is made beside them later cannot be read.
    """
    closed = [os.path.realpath(path) for path in hidden]

    def around(folder: str) -> Iterator[str]:
        for entry in os.scandir(folder):
            if is_below(entry.path, closed):
                continue
            if any(path.startswith(f"{entry.path}/") for path in closed):
                if not entry.is_symlink():
                    yield from around(entry.path)
            else:
                yield entry.path

    return (*around("/"), *shown)
