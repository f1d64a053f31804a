"""A real verifier for tests: the command itself as a process of its own, and a way to ask it."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
START_S = 120.0
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class Served:
    """A running server."""

    url: str
    process: subprocess.Popen[str]

    def ask(
        self, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        """Status, JSON and headers. `body`: posted, as JSON unless it is bytes."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, headers or {})
        try:
            with urllib.request.urlopen(request, timeout=300) as response:
                return response.status, json.loads(response.read()), dict(response.headers)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read()), dict(error.headers)

    def workers(self) -> list[dict[str, Any]]:
        return self.ask("/stats")[1]["workers"]

    def wait(self, holds: Any, seconds: float = START_S) -> Any:
        """What `holds` returns once it is true. Raises AssertionError after `seconds`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := holds():
                return found
            assert self.process.poll() is None, "the server ended"
            time.sleep(0.05)
        raise AssertionError(f"not within {seconds:g} s")


@functools.cache
def shared_server() -> Served:
    """One server for all tests of a run, because starting it takes seconds: two workers and two
    places in the queue. It ends with the process."""
    stack = contextlib.ExitStack()
    store = stack.enter_context(tempfile.TemporaryDirectory())
    options = ("--workers_per_device=2", "--queue=2", "--deadline_s=60", "--problem_timeout_s=20")
    server = stack.enter_context(served(Path(store), *options))
    atexit.register(stack.close)
    return server


def _end_with_us() -> None:
    """A test run that is killed leaves no server behind."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@contextlib.contextmanager
def served(store: Path, *options: str, env: dict[str, str] | None = None) -> Iterator[Served]:
    """`python -m verification serve` on a free port, until SIGTERM."""
    command = [sys.executable, "-m", "verification", "serve", "--port=0", f"--store={store}"]
    process = subprocess.Popen(
        [*command, *options],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        preexec_fn=_end_with_us,
    )
    try:
        line = process.stdout.readline() if process.stdout else ""
        found = re.search(r"http://\S+", line)
        assert found, f"expected an address, got {line!r}"
        yield Served(url=found[0], process=process)
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()
        process.wait()
