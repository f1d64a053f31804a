"""What a worker may not do, and how it answers: the life of a forked child.

Not covered: the file system stays readable and other processes visible (a private mount and PID
namespace, seccomp and Landlock are not used yet); a child that leaves its process group outlives
it.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import pwd
import resource
import signal
import socket
import traceback
from collections.abc import Callable
from typing import Any

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
PR_SET_PDEATHSIG = 1
MAX_MESSAGE_BYTES = 16 << 20

Handlers = dict[str, Callable[..., Any]]


def live(channel: socket.socket, request: dict[str, Any], user: int | None) -> None:
    """Be a worker, from fork to exit. Never returns."""
    status = 1
    try:
        os.setsid()
        _redirect_output(request["config"].get("log", os.devnull))
        isolation = confine(request["limits"], user if request["role"] == "solution" else None)
        serve(channel, _handlers(channel, request, isolation))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _handlers(
    channel: socket.socket, request: dict[str, Any], isolation: dict[str, bool]
) -> Handlers:
    """The worker's handlers; what goes wrong in making them answers the first call."""
    module, function = request["entry"].split(":")
    try:
        return getattr(importlib.import_module(module), function)(request["config"], isolation)
    except Exception as error:
        _send(channel, {"error": describe(error)})
        raise


def _redirect_output(path: str) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)


def confine(limits: dict[str, Any], user: int | None) -> dict[str, bool]:
    """Take away the network, the user and unlimited resources; says which of these worked."""
    libc = ctypes.CDLL(None, use_errno=True)
    network = libc.unshare(CLONE_NEWNET) == 0
    if not network and user is None:
        uid, gid = os.getuid(), os.getgid()
        network = libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) == 0
        if network:
            _map_user(uid, gid)
    file_bytes = int(limits["file_gib"] * 2**30)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if limits["address_space_gib"] is not None:
        space = int(limits["address_space_gib"] * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (space, space))
    if user is not None:
        resource.setrlimit(resource.RLIMIT_NPROC, (limits["processes"], limits["processes"]))
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return {"network": network, "user": user is not None, "limits": True}


def _map_user(uid: int, gid: int) -> None:
    """Keep our own ids inside a new user namespace, so that files stay ours."""
    for path, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        with open(f"/proc/self/{path}", "w") as file:
            file.write(text)


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


def unprivileged_user() -> int | None:
    """The id of `nobody`, when we are root and that user can read what a child needs."""
    if os.getuid() != 0:
        return None
    import torch

    try:
        nobody = pwd.getpwnam("nobody").pw_uid
    except KeyError:
        return None
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(nobody)
            os.setuid(nobody)
            readable = all(os.access(p, os.R_OK) for p in (torch.__file__, os.__file__, __file__))
            os._exit(0 if readable else 1)
        finally:
            os._exit(1)
    return nobody if os.waitpid(pid, 0)[1] == 0 else None
