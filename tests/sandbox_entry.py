"""A worker for the sandbox tests: each handler misbehaves in one way."""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import Any


def boom() -> None:
    raise ValueError("boom")


def eat() -> None:
    hoard = []
    while True:
        hoard.append(bytearray(b"x") * (64 << 20))
        time.sleep(0.01)


def connect() -> None:
    with socket.socket() as plain:
        plain.settimeout(2)
        plain.connect(("192.0.2.1", 80))


def shout() -> None:
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, b"PASS\n")
        except OSError:
            continue


def fill(path: str) -> None:
    with open(path, "wb") as file:
        file.write(b"x" * (4 << 20))


def ask_for_a_worker(address: str, leave_first: bool) -> str:
    """Connect to the warm parent, as a child or as a daemon that has left its family."""
    if leave_first and os.fork() > 0:
        time.sleep(0.5)
        with open(f"{address}.answer") as file:
            return file.read()
    if leave_first:
        os.setsid()
        if os.fork() > 0:
            os._exit(0)
        time.sleep(0.1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as control:
        control.connect(address)
        try:
            control.send(b'{"status": 1}')
            answer = control.recv(1000).decode()
        except OSError as error:
            answer = type(error).__name__
    if leave_first:
        with open(f"{address}.answer", "w") as file:
            file.write(answer)
        os._exit(0)
    return answer


def fork_sleeper() -> int:
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
        os._exit(0)
    return pid


def handlers(config: dict[str, Any], isolation: dict[str, bool]) -> dict[str, Any]:
    return {
        "who": lambda: {
            "uid": os.getuid(),
            "isolation": isolation,
            "environment": dict(os.environ),
        },
        "ping": lambda: 1,
        "length": lambda: len(config["code"]),
        "boom": boom,
        "interfaces": lambda: [name for _, name in socket.if_nameindex()],
        "connect": connect,
        "die": lambda: os.kill(os.getpid(), signal.SIGSEGV),
        "leave": lambda: os._exit(0),
        "eat": eat,
        "hang": lambda: time.sleep(600),
        "shout": shout,
        "fill": fill,
        "fork_sleeper": fork_sleeper,
        "ask_for_a_worker": ask_for_a_worker,
    }
