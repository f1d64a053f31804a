"""What a worker may not do, and how it answers: the life of a forked child.

    role        loses
    reference   the network
    solution    the network, our user and files, every other process, most system calls,
                device files it is not to open
    builder     the same, but may start programs: compilers

`runtime.means` says how much of that this machine allows, `schemas.records.Isolation` what each
part is called.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import socket
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

from runtime import landlock, seccomp
from runtime.landlock import Rules
from runtime.linux import (
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWUSER,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    call,
    drop_capabilities,
)
from runtime.means import Means, become_another_user, new_namespaces
from runtime.view import MAIL, PRIVATE, View, enter, view_of

MAX_MESSAGE_BYTES = 16 << 20
OURS = "reference"
"""The role that keeps our user."""

Handlers = dict[str, Callable[..., Any]]


def live(channel: socket.socket, request: dict[str, Any], means: Means) -> None:
    """Be a worker, from fork to exit. Never returns."""
    status = 1
    try:
        os.setsid()
        _close_all_but(channel.fileno())
        _redirect_output(request["config"].get("log", os.devnull))
        serve(channel, _handlers(channel, request, means))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _handlers(channel: socket.socket, request: dict[str, Any], means: Means) -> Handlers:
    """The worker's handlers, made when it is confined; what goes wrong answers the first call.

    The entry is told what was taken away, in `config["why_not"]` why the rest was not, and in
    `config["mail"]` where its view has that folder. The variables of `config["environment"]` are
    set before anything else of it: CUDA reads them once, and our parent has none of it running.
    """
    os.environ |= request["config"].get("environment", {})
    module, function = request["entry"].split(":")
    try:
        isolation = confine(request, means)
        config = {**request["config"], "why_not": means.why_not}
        if config.get("mail") and request["role"] != OURS and means.view:
            config["mail"] = MAIL
        return getattr(importlib.import_module(module), function)(config, isolation)
    except Exception as error:
        _send(channel, {"error": describe(error)})
        raise


def _close_all_but(kept: int) -> None:
    """Descriptors of our parent lead past any view: to its folders and its clients."""
    os.closerange(3, kept)
    os.closerange(kept + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _redirect_output(path: str) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)


def confine(request: dict[str, Any], means: Means) -> dict[str, bool]:
    """Take away what the role does without; says what that was, by `Isolation`'s names.

    Raises OSError when something fails that worked when it was tried.
    """
    role, limits = request["role"], request["limits"]
    if role == OURS:
        _leave_network(means)
        _limit(limits)
        call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
        return {**dict.fromkeys(_PARTS, False), "network": means.network, "limits": True}
    view = view_of(request["config"], request["hide"])
    rules = _rules(view, means)
    _leave_namespaces(view, means, int(limits["temporary_gib"] * 2**30))
    _settle(view, means)
    _limit(limits)
    own_count = means.user or means.user_namespace
    if own_count:
        most = limits["processes"]
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
    if means.user:
        become_another_user()
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user forgets it
    drop_capabilities()
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if means.landlock:
        landlock.restrict(rules, means.landlock)
    if role == "builder":
        os.nice(BUILDER_NICE)
    if means.seccomp:
        seccomp.install(may_start_programs=role == "builder")
    return {
        "network": means.network or means.seccomp,
        "user": means.user,
        "limits": own_count,
        "processes": means.processes,
        "filesystem": means.view or means.landlock > 0,
        "syscalls": means.seccomp,
    }


BUILDER_NICE = 15
"""As many compilers as cores would stop what is timed for milliseconds, in its own process and in
the judge's."""
_PARTS = ("network", "user", "limits", "processes", "filesystem", "syscalls")


def _leave_network(means: Means) -> None:
    if means.network:
        new_namespaces(CLONE_NEWNET | (CLONE_NEWUSER if os.getuid() != 0 else 0))


def _leave_namespaces(view: View, means: Means, size_bytes: int) -> None:
    """The PID namespace is left already: a child is born outside of it."""
    flags = CLONE_NEWUSER if means.user_namespace else 0
    flags |= CLONE_NEWNET if means.network else 0
    flags |= CLONE_NEWNS | CLONE_NEWIPC if means.view else 0
    if flags:
        new_namespaces(flags)
    if means.view:
        enter(view, size_bytes, own_processes=means.processes)


def _settle(view: View, means: Means) -> None:
    """Work in a folder of our own, and have no name."""
    os.chdir(view.home if means.view or view.home not in PRIVATE else "/")
    os.environ |= {"HOME": view.home, "TMPDIR": view.home, "USER": "nobody", "LOGNAME": "nobody"}
    tempfile.tempdir = None  # it remembers the parent's


def _rules(view: View, means: Means) -> Rules:
    """What Landlock is to allow; where there is no view, it also keeps what is hidden from reading.

    The folders that are private in a view are everybody's without one.
    """
    if means.view:
        proc = ("/proc",) if means.processes else ()  # names of threads are written there
        mail = (MAIL,) if view.mail else ()
        write = (*view.write, *view.private, *proc)
        return Rules(write=write, fill=mail, shut=view.shut)
    own = tuple(path for path in view.private if path not in PRIVATE)
    mail = (view.mail,) if view.mail else ()
    read = landlock.readable((*view.hide, *PRIVATE, *view.shut), (*view.read, *mail))
    return Rules(write=(*view.write, *own), fill=mail, read=read, shut=view.shut)


def _limit(limits: dict[str, Any]) -> None:
    """Limits of one process, hard ones, which only root can raise again."""
    file_bytes = int(limits["file_gib"] * 2**30)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    files = limits["open_files"]
    if 0 <= (hard := resource.getrlimit(resource.RLIMIT_NOFILE)[1]) < files:
        files = hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    if limits["address_space_gib"] is not None:
        space = int(limits["address_space_gib"] * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (space, space))


def serve(channel: socket.socket, handlers: Handlers) -> None:
    """Answer requests, one JSON line each, until the other end closes the channel."""
    reader = channel.makefile("rb")
    for line in reader:
        request = json.loads(line)
        try:
            reply = {"result": handlers[request["method"]](**request["params"])}
        except Exception as error:
            reply = {"error": describe(error)}
        _send(channel, reply)


def describe(error: BaseException) -> dict[str, str]:
    frames = traceback.format_exception(error)
    return {
        "type": type(error).__name__,
        "message": str(error)[:4000],
        "trace": "".join(frames)[-6000:],
    }


def _send(channel: socket.socket, value: Any) -> None:
    channel.sendall(json.dumps(value).encode() + b"\n")
