"""The warm parent: a process with torch imported that forks one child per problem or solution.

Run as `python -m runtime.zygote OWNER_FD ADDRESS {warm,cool} MODULES` by
`runtime.sandbox.Zygote`. It never touches a device, holds no secret and runs no foreign code
itself. A fork costs milliseconds where a fresh interpreter pays seconds for importing torch, and
behind a parent that has compiled something a child's first torch.compile takes a tenth. Any number
of processes share one: each connects to ADDRESS and owns the children it asked for. When a client
goes its children go; when the owner goes, everything does.

A child leads a process group of its own, loses what `runtime.confine` can take away, and then
serves JSON requests on its channel until the other end closes it. One that runs foreign code is
also the first process of a PID namespace where that works: with it ends all that it started.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from unittest import mock

import psutil

from runtime.confine import OURS, live
from runtime.means import Means, find_means, process_namespace

MAX_REQUEST_BYTES = 4 << 20


def main() -> None:
    owner = socket.socket(fileno=int(sys.argv[1]))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{sys.argv[2]}.new")
    os.chmod(f"{sys.argv[2]}.new", 0o600)
    listener.listen(256)  # who connects during the warm-up waits
    os.rename(f"{sys.argv[2]}.new", sys.argv[2])  # who finds it can connect
    with _no_device():
        for name in sys.argv[4:]:
            optional = name.startswith("?")
            with contextlib.suppress(ImportError) if optional else contextlib.nullcontext():
                importlib.import_module(name.removeprefix("?"))
        _warm_up(compiler=sys.argv[3] == "warm")
    _forget_device_answers()
    gc.collect()
    # A child's collector leaves alone what is here now: walking half a million objects of torch
    # takes 0.2 s, and the first walk copies every page that holds one.
    gc.freeze()
    try:
        Server(owner, listener, find_means()).run()
    finally:
        os.unlink(sys.argv[2])


class Server:
    """Forks on request. `children` by client: pid -> exit code, None while alive."""

    def __init__(self, owner: socket.socket, listener: socket.socket, means: Means) -> None:
        self._owner, self._listener, self._means = owner, listener, means
        self._owner_pid = os.getppid()
        self._children: dict[socket.socket, dict[int, int | None]] = {}
        self._orphans: dict[int, int | None] = {}
        self._selector = selectors.DefaultSelector()
        for source in (owner, listener):
            self._selector.register(source, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until the owner's end of its socket closes."""
        while True:
            for key, _ in self._selector.select():
                source = key.fileobj
                if source is self._owner:
                    for client in list(self._children):
                        self._drop(client)
                    return
                if source is self._listener:
                    self._welcome()
                elif isinstance(source, socket.socket):
                    self._answer(source)

    def _welcome(self) -> None:
        client, _ = self._listener.accept()
        if not self._invited(client):
            client.close()
            return
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_REQUEST_BYTES)
        self._children[client] = {}
        self._selector.register(client, selectors.EVENT_READ)

    def _invited(self, client: socket.socket) -> bool:
        """Only the owner's process tree may ask, and no child of ours: a solution that runs as the
        same user could otherwise have a worker forked for it that is not confined as it is."""
        peer = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid = struct.unpack("3i", peer)[0]
        try:
            line = [pid, *(parent.pid for parent in psutil.Process(pid).parents())]
        except psutil.NoSuchProcess:
            return False
        return self._owner_pid in line and os.getpid() not in line

    def _answer(self, client: socket.socket) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(client, MAX_REQUEST_BYTES, 1)
        except ConnectionError:
            data, descriptors = b"", []
        if not data:
            self._drop(client)
            return
        children = self._children[client]
        _reap(children)
        _reap(self._orphans)
        request = json.loads(data)
        if "status" in request:
            reply = {"status": _status(children, request["status"])}
        else:
            pid = self._fork(socket.socket(fileno=descriptors[0]), request)
            children[pid] = None
            reply = {"pid": pid}
        with contextlib.suppress(ConnectionError):
            client.send(json.dumps(reply).encode())

    def _fork(self, channel: socket.socket, request: dict[str, object]) -> int:
        apart = self._means.processes and request["role"] != OURS
        with process_namespace() if apart else contextlib.nullcontext():
            pid = os.fork()
            if pid == 0:
                # A client's socket that a child kept open would outlive the client.
                for source in (self._owner, self._listener, *self._children):
                    source.close()
                self._selector.close()
                live(channel, request, self._means)
        channel.close()
        return pid

    def _drop(self, client: socket.socket) -> None:
        for pid, status in self._children.pop(client).items():
            if status is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                self._orphans[pid] = None
        self._selector.unregister(client)
        client.close()


def _reap(children: dict[int, int | None]) -> None:
    for pid in [p for p, status in children.items() if status is None]:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            children[pid] = os.waitstatus_to_exitcode(status)


def _status(children: dict[int, int | None], pid: int) -> int | None:
    """Exit code (negative: the signal) of a child whose channel has closed; None if it lives on."""
    if pid not in children:
        return None
    if children[pid] is None:
        for _ in range(200):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                children[pid] = os.waitstatus_to_exitcode(status)
                break
            time.sleep(0.01)
    return children.pop(pid, None)


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


if __name__ == "__main__":
    main()
