"""The warm parent: a process with torch imported that forks one child per problem or solution.

Run as `python -m runtime.zygote FD {warm,cool} MODULES` by `runtime.sandbox.Zygote`. It never
touches a device, holds no secret and runs no foreign code itself. A fork costs milliseconds
where a fresh interpreter pays seconds for importing torch, and a child's first torch.compile
takes a tenth of a cold one.

A child leads a process group of its own, loses what `confine` can take away, and then serves JSON
requests on its channel until the other end closes it.

What `confine` does not cover: the file system stays readable and other processes visible (a
private mount and PID namespace, seccomp and Landlock are not used yet); a child that leaves its
process group outlives it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import pwd
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
PR_SET_PDEATHSIG = 1
MAX_MESSAGE_BYTES = 16 << 20

Handlers = dict[str, Callable[..., Any]]


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    with _no_device():
        for name in sys.argv[3:]:
            optional = name.startswith("?")
            with contextlib.suppress(ImportError) if optional else contextlib.nullcontext():
                importlib.import_module(name.removeprefix("?"))
        _warm_up(compiler=sys.argv[2] == "warm")
    _forget_device_answers()
    user = _unprivileged_user()
    control.sendall(b'{"ready": true}\n')
    children: dict[int, int | None] = {}
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, 1)
        _reap(children)
        if not data:
            break
        request = json.loads(data)
        if "status" in request:
            _send(control, {"status": _status(children, request["status"])})
            continue
        channel = socket.socket(fileno=descriptors[0])
        pid = os.fork()
        if pid == 0:
            control.close()
            _child(channel, request, user)
        channel.close()
        children[pid] = None
        _send(control, {"pid": pid})
    for pid, status in children.items():
        if status is None:
            os.killpg(pid, signal.SIGKILL)


@contextlib.contextmanager
def _no_device() -> Iterator[None]:
    """Hide every GPU from torch.

    A CUDA runtime that a parent has as much as asked for the number of devices cannot be used
    after a fork, and importing torch's compiler is enough to ask.
    """
    import torch

    def refuse() -> None:
        raise RuntimeError("the warm parent has no device")

    with (
        mock.patch.object(torch.cuda, "is_available", lambda: False),
        mock.patch.object(torch.cuda, "device_count", lambda: 0),
        mock.patch.object(torch.cuda, "_lazy_init", refuse),
    ):
        yield


def _forget_device_answers() -> None:
    """Clear what torch remembers of a machine without a GPU, such as that Triton is of no use.

    Only answers about devices: torch's compiler also caches that it has registered its patterns.
    """
    homes = ("torch.utils._triton", "torch.cuda", "torch._dynamo.device_interface")
    for cached in gc.get_objects():
        # By exact type: `isinstance` would wake dead proxies and deprecated aliases.
        if type(cached) is functools._lru_cache_wrapper:
            system = cached.__qualname__ == "CacheBase.get_system"
            if system or cached.__module__.startswith(homes):
                cached.cache_clear()


def _warm_up(compiler: bool) -> None:
    """Load what children would load one by one; with `compiler`, compile a tiny function too.

    One thread only, because a thread pool would not survive the fork.
    """
    import torch

    from runtime import trace

    trace.preload()
    torch.set_num_threads(1)
    if compiler:
        with torch.no_grad():
            torch.compile(lambda x: torch.softmax(x * 2, -1).sum())(torch.randn(8, 8))
        torch._dynamo.reset()


def _child(channel: socket.socket, request: dict[str, Any], user: int | None) -> None:
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


def _reap(children: dict[int, int | None]) -> None:
    for pid in [p for p, status in children.items() if status is None]:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            children[pid] = os.waitstatus_to_exitcode(status)


def _status(children: dict[int, int | None], pid: int) -> int | None:
    """Exit code (negative: the signal) of a child whose channel has closed; None if it lives on."""
    if children.get(pid) is None:
        for _ in range(200):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                children[pid] = os.waitstatus_to_exitcode(status)
                break
            time.sleep(0.01)
    return children.pop(pid, None)


def _unprivileged_user() -> int | None:
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


if __name__ == "__main__":
    main()
