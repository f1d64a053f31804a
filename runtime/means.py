"""What this machine lets us take away from a worker, found out once by trying it in a child.

A worker then does exactly that and nothing less: what worked in the trial and fails in a worker is
an error, and no worker that is less confined than its verdict says.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from runtime import landlock, seccomp
from runtime.linux import (
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    PR_SET_NO_NEW_PRIVS,
    call,
)
from runtime.view import enter, needed, view_of

OWN_USERS = 1 << 30
"""User ids from here on are nobody's; each worker draws one of as many."""


@dataclass(frozen=True, kw_only=True)
class Means:
    """Each part that works here, and of those that do not the reason."""

    network: bool
    """A network namespace of its own; without privilege, in a user namespace of its own."""
    view: bool
    """A view of the file system of its own (`runtime.view`)."""
    processes: bool
    """A PID namespace of its own."""
    user: bool
    """Another user, who can read what a child needs."""
    landlock: int
    """Landlock's version, 0 without."""
    seccomp: bool
    why_not: dict[str, str] = field(default_factory=dict)

    @property
    def user_namespace(self) -> bool:
        """Whether the other namespaces need one of these."""
        return os.getuid() != 0 and (self.network or self.view)


def find_means() -> Means:
    """Try every part in a child of its own; takes a few milliseconds each."""
    needed()  # looked up once, for every child
    root = os.getuid() == 0
    mine = 0 if root else CLONE_NEWUSER
    why = {
        "network": _attempt(lambda: new_namespaces(mine | CLONE_NEWNET)),
        "view": _attempt(lambda: _try_view(mine)),
        "seccomp": _attempt(_try_seccomp),
        "landlock": _attempt(_try_landlock),
    }
    if root:
        why["processes"] = _attempt(_try_processes)
        why["user"] = _attempt(lambda: _try_user(view=not why["view"]))
    else:
        why["processes"] = "needs root, or CAP_SYS_ADMIN"
        why["user"] = "needs root: only root can become another user"
    return Means(
        network=not why["network"],
        view=not why["view"],
        processes=not why["processes"],
        user=not why["user"],
        landlock=0 if why["landlock"] else landlock.version(),
        seccomp=not why["seccomp"],
        why_not={part: reason for part, reason in why.items() if reason},
    )


def _attempt(trial: Callable[[], None]) -> str:
    """Do something in a child; why it did not work, or nothing."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            trial()
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}"[:1000].encode())
            os._exit(1)
        os._exit(0)
    os.close(writer)
    with open(reader) as said:
        reason = said.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return reason or ("" if code == 0 else f"the trial ended with code {code}")


def new_namespaces(flags: int) -> None:
    """Leave the namespaces of our parent. Raises OSError."""
    uid, gid = os.getuid(), os.getgid()
    call("unshare", flags)
    if flags & CLONE_NEWUSER:  # keep our own ids in it, so that files stay ours
        for path, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            with open(f"/proc/self/{path}", "w") as file:
                file.write(text)


@contextlib.contextmanager
def process_namespace() -> Iterator[None]:
    """Around one fork: the child is the first process of a new PID namespace. Raises OSError."""
    ours = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        call("unshare", CLONE_NEWPID)
        try:
            yield
        finally:
            call("setns", ours, CLONE_NEWPID)
    finally:
        os.close(ours)


def become_another_user() -> None:
    """From root to a user whom nobody else is; to `nobody` where only some ids exist.

    A user of its own, because the number of processes is counted by user. Raises OSError.
    """
    os.setgroups([])
    user = OWN_USERS + secrets.randbelow(OWN_USERS)
    try:
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    except OSError:  # a container that has only some of the ids
        nobody = pwd.getpwnam("nobody").pw_uid
        os.setresgid(nobody, nobody, nobody)
        os.setresuid(nobody, nobody, nobody)


def _try_view(flags: int) -> None:
    new_namespaces(flags | CLONE_NEWNS | CLONE_NEWIPC)
    enter(view_of({"view_shut": [os.devnull]}), 1 << 20, own_processes=False)
    try:
        os.open(os.devnull, os.O_RDONLY)
    except PermissionError:
        return
    raise OSError("a device file that is shut could be opened")


def _try_user(view: bool) -> None:
    if view:
        _try_view(0)
    become_another_user()
    torch = importlib.util.find_spec("torch")
    files = [os.__file__, __file__, *([torch.origin] if torch and torch.origin else [])]
    unreadable = [path for path in files if not os.access(path, os.R_OK)]
    if unreadable:
        raise PermissionError(f"another user cannot read {unreadable[0]}")


def _try_processes() -> None:
    with process_namespace():
        pid = os.fork()
        if pid == 0:
            os._exit(0 if os.getpid() == 1 else 1)
    if os.waitpid(pid, 0)[1] != 0:
        raise OSError("a new PID namespace does not begin with process 1")
    if os.fork() == 0:  # and later children are outside again
        os._exit(0)


def _try_seccomp() -> None:
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    seccomp.install(may_start_programs=False)
    try:
        os.execv("/bin/true", ["true"])
    except PermissionError:
        return
    except OSError as error:
        raise OSError("the filter lets programs start") from error


def _try_landlock() -> None:
    abi = landlock.version()
    if abi < landlock.ENOUGH:
        raise OSError(f"expected Landlock version {landlock.ENOUGH} or newer, got {abi or 'none'}")
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    landlock.restrict(landlock.Rules(write=()), abi)
    try:
        os.open("/tmp/ops6k-trial", os.O_CREAT | os.O_WRONLY)
    except PermissionError:
        return
    raise OSError("a file could be made although no rule allows it")
