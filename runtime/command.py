"""A worker that starts programs, for the role `builder`: compilers on foreign source."""

from __future__ import annotations

import os
import subprocess
from collections import deque
from collections.abc import Callable
from typing import Any

OUTPUT_BYTES = 64 << 10
PIECE_BYTES = 8 << 10


def run(command: list[str], cwd: str, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """Run a program to its end: its exit code (negative: the signal that ended it) and the last
    64 KiB of what it printed, both streams as they came.

    `environment` is added to ours. A program that cannot be started raises OSError. There is no
    time limit here: the caller's `Worker.call` has one, and with the worker ends all it started.
    """
    done = subprocess.Popen(
        command,
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    pieces: deque[bytes] = deque(maxlen=OUTPUT_BYTES // PIECE_BYTES + 1)
    with done:
        assert done.stdout is not None
        while piece := done.stdout.read(PIECE_BYTES):
            pieces.append(piece)
    output = b"".join(pieces)[-OUTPUT_BYTES:]
    return {"code": done.returncode, "output": output.decode("utf-8", "replace")}


def handlers(config: dict[str, Any], isolation: dict[str, bool]) -> dict[str, Callable[..., Any]]:
    """The entry point: `run`, and `isolation` with the reasons for what it lacks."""
    return {
        "run": run,
        "isolation": lambda: {"isolation": isolation, "why_not": config["why_not"]},
    }
