"""A worker's own view of the file system: read-only, without homes, temporary folders private.

Everything is where it is outside, so paths mean the same on both sides, but for the mail. Folders
that may hold what is not the worker's (homes, the store, the build cache, sockets of services) are
empty in it, but for what a child needs to run. Built with the mount calls of Linux 5.12.

Device files that are named are shut: they are there and cannot be opened, as where a cluster's
scheduler keeps a job to its own GPUs.

Not covered: what everybody may read elsewhere stays readable; all other device files are ruled by
their modes, and by `runtime.landlock`.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pwd
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.linux import call, syscall

ROOT = str(Path(__file__).resolve().parent.parent)
HIDDEN = ("/root", "/home", "/run")
"""Homes, and sockets and secrets of services."""
PRIVATE = ("/tmp", "/var/tmp", "/dev/shm")
WORK = "work"
"""Below `config["scratch"]`, a worker's own folder, of limited size where there is a view."""

OPEN_TREE, MOVE_MOUNT, MOUNT_SETATTR = 428, 429, 442
AT_FDCWD, AT_EMPTY_PATH, AT_RECURSIVE = -100, 0x1000, 0x8000
OPEN_TREE_CLONE, OPEN_TREE_CLOEXEC, MOVE_MOUNT_F_EMPTY_PATH = 1, os.O_CLOEXEC, 4
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 2, 4, 8, 1 << 14, 1 << 18
MAIL = "/run/ops6k-mail"
"""Where the view has the mail. Outside it lies in a private folder, in which all is allowed, and
Landlock allows below a folder what it allows in it."""
INODES = 100_000
"""Files a private folder may hold: each takes memory of its own."""


@dataclass(frozen=True, kw_only=True)
class View:
    """Which paths are what to a worker. Whatever is named nowhere is read-only."""

    read: tuple[str, ...]
    """Shown even where it lies in a hidden or private folder."""
    write: tuple[str, ...]
    """Folders in which it may do as it likes."""
    mail: str | None
    """A folder whose files it may fill, but neither make nor remove nor cut short."""
    hide: tuple[str, ...]
    """Empty folders."""
    private: tuple[str, ...]
    """Folders of its own: empty at first, in memory, gone with it."""
    shut: tuple[str, ...] = ()
    """Device files that it cannot open."""

    @property
    def home(self) -> str:
        """Where it works and keeps what it must."""
        return next((path for path in self.private if path not in PRIVATE), PRIVATE[0])


def view_of(config: dict[str, Any], owner_hides: Iterable[str] = ()) -> View:
    """The view a worker gets by its `config`.

    `scratch` and each of `view_read` are shown, `mail` is to be filled, `view_write` to be
    written, `view_hide` and `owner_hides` hidden and `view_shut` shut where they exist.
    """
    scratch, mail = config.get("scratch"), config.get("mail")
    work = [os.path.join(scratch, WORK)] if scratch else []
    read = _real((*needed(), *([scratch] if scratch else ()), *config.get("view_read", ())))
    write = _real(config.get("view_write", ()))
    hide = (*HIDDEN, _home(), f"{ROOT}/.git", *owner_hides, *config.get("view_hide", ()))
    private = _folders((*PRIVATE, *(path for path in work if os.path.isdir(path))))
    return View(
        read=read,
        write=write,
        mail=os.path.realpath(mail) if mail else None,
        hide=tuple(p for p in _folders((*hide, *_closed((*read, *write)))) if p not in private),
        private=private,
        shut=tuple(path for path in config.get("view_shut", ()) if os.path.exists(path)),
    )


@functools.cache
def needed() -> tuple[str, ...]:
    """What a child reads: the interpreter, its packages, this repository, the CUDA toolkit.

    Not covered: one of these that is a home itself is shown whole.
    """
    named = [ROOT, sys.prefix, sys.base_prefix, sys.exec_prefix, *sys.path]
    for variable in ("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH"):
        named += os.environ.get(variable, "").split(":")
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        named.append(str(Path(nvcc).resolve().parent.parent))
    found = dict.fromkeys(os.path.abspath(path) for path in named if path and os.path.exists(path))
    return tuple(path for path in found if not is_below(os.path.dirname(path), found))


def _home() -> str:
    """The home of whoever we are; $HOME may say otherwise here."""
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return ""


def _real(paths: Iterable[str]) -> tuple[str, ...]:
    """Paths as named and with links followed, for both may be used."""
    both = ((os.path.abspath(path), os.path.realpath(path)) for path in paths)
    return tuple(dict.fromkeys(path for pair in both for path in pair))


def _folders(paths: Iterable[str]) -> tuple[str, ...]:
    """Those that are folders, but for the root itself."""
    real = dict.fromkeys(os.path.realpath(path) for path in paths if path)
    return tuple(path for path in real if path != "/" and os.path.isdir(path))


def _closed(paths: Iterable[str]) -> Iterator[str]:
    """Folders above `paths` that another user may not enter, the outermost of each: hidden, they
    are replaced by one that he may."""
    for path in paths:
        for folder in reversed(Path(path).parents):
            if not folder.stat().st_mode & stat.S_IXOTH:
                yield str(folder)
                break


def is_below(path: str, folders: Iterable[str]) -> bool:
    """Whether a path is one of `folders` or lies in one."""
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


class _Attributes(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "namespace")
    )


def enter(view: View, size_bytes: int, own_processes: bool) -> None:
    """Make the view ours; the caller has a new mount namespace. Raises OSError.

    `size_bytes` is how much a private folder holds; `own_processes` says that /proc is to show
    the processes of our own PID namespace.
    """
    call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
    os.umask(0o022)
    covered = (*view.hide, *view.private)
    trees = {path: _tree(path) for path in view.write}
    trees |= {MAIL: _tree(view.mail)} if view.mail else {}
    trees |= {p: _tree(p, MOUNT_ATTR_RDONLY) for p in view.read if is_below(p, covered)}
    shut = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV
    trees |= {path: _tree(path, shut) for path in view.shut}
    masks = {path: _tree(path) for path in _mounted_below("/proc")} if own_processes else {}
    _set_attributes("/", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, AT_RECURSIVE)
    places = sorted({*covered, *trees}, key=lambda path: path.count("/"))
    emptied = []
    for path in places:
        if path in view.private:
            _mount_memory(path, size_bytes, 0o1777)
        elif path in view.hide and os.path.isdir(path):  # else what it lay in is empty already
            _mount_memory(path, size_bytes, 0o755)
            emptied.append(path)
        if path in trees:
            _place(trees[path], path)
    for path in emptied:
        _set_attributes(path, MOUNT_ATTR_RDONLY)
    if own_processes:
        call("mount", b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None)
        # What a container lays over parts of /proc lies over the new one too.
        for path, tree in masks.items():
            if os.path.exists(path):
                _place(tree, path)
            else:
                os.close(tree)


def _tree(path: str, attributes: int = 0) -> int:
    """A copy of what is mounted at and below a path, not yet placed anywhere."""
    flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_RECURSIVE
    tree = syscall("open_tree", OPEN_TREE, AT_FDCWD, os.fsencode(path), flags)
    wanted = _Attributes(attributes | MOUNT_ATTR_NOSUID, 0, 0, 0)
    flags = AT_EMPTY_PATH | AT_RECURSIVE
    syscall("mount_setattr", MOUNT_SETATTR, tree, b"", flags, wanted, ctypes.sizeof(wanted))
    return tree


def _place(tree: int, path: str) -> None:
    source_is_folder = os.path.isdir(f"/proc/self/fd/{tree}")
    if not os.path.lexists(path):
        os.makedirs(path if source_is_folder else os.path.dirname(path), exist_ok=True)
        if not source_is_folder:
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
    flags = MOVE_MOUNT_F_EMPTY_PATH
    syscall("move_mount", MOVE_MOUNT, tree, b"", AT_FDCWD, os.fsencode(path), flags)
    os.close(tree)


def _mount_memory(path: str, size_bytes: int, mode: int) -> None:
    options = f"size={size_bytes},nr_inodes={INODES},mode={mode:o}"
    flags = MS_NOSUID | MS_NODEV
    call("mount", b"ops6k", os.fsencode(path), b"tmpfs", flags, options.encode())


def _set_attributes(path: str, attributes: int, flags: int = 0) -> None:
    wanted = _Attributes(attributes, 0, 0, 0)
    size = ctypes.sizeof(wanted)
    syscall("mount_setattr", MOUNT_SETATTR, AT_FDCWD, os.fsencode(path), flags, wanted, size)


def _mounted_below(folder: str) -> list[str]:
    """Mount points below a folder, outermost first."""
    with open("/proc/self/mountinfo") as file:
        points = [line.split(" ")[4] for line in file]
    below = {p.encode().decode("unicode_escape") for p in points if p.startswith(f"{folder}/")}
    return sorted(below, key=lambda path: path.count("/"))
