"""What solution code asks torch and the system for: two cheap filters inside its process.

Evidence from here may only lower a verdict. `DispatchAudit` sees operators dispatched in one
call; it does not see an entry that goes round the dispatcher (`at::cpu::mm`), a guard that
excludes Python, or another thread: those are for kernel attribution. `ProcessAudit` sees what
Python code asks the interpreter for, not what native code does.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from verification.workers.bands import Bands

ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
FREE = ALLOCATIONS | {
    "zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "full", "full_like",
    "new_full", "fill_", "zero_", "scalar_tensor", "arange", "resize_", "set_",
    "view", "_unsafe_view", "reshape", "_reshape_alias", "as_strided", "expand", "permute",
    "transpose", "t", "squeeze", "unsqueeze", "slice", "select", "narrow", "detach", "alias",
    "split", "split_with_sizes", "chunk", "unbind", "flatten", "unfold", "view_as_real",
    "copy_", "clone", "_to_copy", "to", "contiguous", "lift_fresh", "_local_scalar_dense", "item",
    "is_pinned", "_pin_memory", "pin_memory", "record_stream", "sym_size", "is_same_size",
}  # fmt: skip
"""Operators that only allocate or move data."""


class DispatchAudit(TorchDispatchMode):
    """Records operators that compute, and gives every allocation poison and guard bands."""

    def __init__(self, bands: Bands) -> None:
        super().__init__()
        self.computed: list[str] = []
        self._bands = bands

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ALLOCATIONS:
            return self._bands.empty(result)
        if name not in FREE:
            self.computed.append(str(func.overloadpacket))
        return result


EVENTS = {
    "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty",
    "os.kill", "socket.connect", "socket.bind", "socket.sendto",
    "ctypes.dlopen", "ctypes.cdata", "sys.addaudithook",
}  # fmt: skip
WATCHED_PATHS = ("/proc/",)
MAX_NOTES = 20


class ProcessAudit:
    """A hook on what the interpreter is asked for; it cannot be taken off again.

    It listens inside `listening` only, that is while solution code runs.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.libraries: set[str] = set()
        """Paths of shared libraries that may be loaded: the solution's own."""
        self._listening = False
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._listening:
            return
        name = str(arguments[0])[:80] if arguments else ""
        if event in EVENTS:
            if event != "ctypes.dlopen" or (name and name not in self.libraries):
                self._note(f"{event} {name}".strip())
        elif event == "open" and name.startswith(WATCHED_PATHS):
            self._note(f"open {name}")

    def _note(self, what: str) -> None:
        if len(self.asked) < MAX_NOTES and what not in self.asked:
            self.asked.append(what)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        self._listening = True
        try:
            yield
        finally:
            self._listening = False


def forbid_compilers() -> None:
    """A solution is hand-written: torch.compile in its process raises."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("torch.compile is not available to a solution")

    torch.compile = refuse
    torch.jit.script = refuse
