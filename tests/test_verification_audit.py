"""What the filters inside the solution's process see, and honest code that looks alike."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F

from verification.workers.audit import DispatchAudit
from verification.workers.bands import BAND_BYTES, Bands


def audited(call: object) -> list[str]:
    audit = DispatchAudit(Bands())
    with torch.no_grad(), audit:
        call()  # type: ignore[operator]
    return audit.computed


X, W = torch.randn(8, 8), torch.randn(8, 8)


@pytest.mark.parametrize(
    "work",
    [
        lambda: X @ W,
        lambda: X.relu(),
        lambda: torch.ops.aten.mul(X, 2),
        lambda: F.softmax(X, -1),
        lambda: torch.nn.Linear(8, 8)(X),
        lambda: X + 0,
        lambda: X.sum(),
        lambda: torch.cat([X, W]),
    ],
)
def test_work_by_torch_is_seen_whichever_way_it_is_called(work: object) -> None:
    assert audited(work)


def test_allocating_and_moving_is_no_work() -> None:
    def honest() -> None:
        out = torch.empty_like(X)
        out.copy_(X)
        torch.zeros(3)
        X.t().contiguous().view(-1)[3:].reshape(-1)
        X.unsqueeze(0).expand(2, 8, 8).float()

    assert audited(honest) == []


def test_it_does_not_see_other_threads() -> None:
    """Said in the module; attribution is for those."""

    def elsewhere() -> None:
        thread = threading.Thread(target=lambda: X @ W)
        thread.start()
        thread.join()

    assert audited(elsewhere) == []


def test_allocations_are_poisoned_and_fenced() -> None:
    bands = Bands()
    with DispatchAudit(bands):
        one = torch.empty(10)
        two = torch.empty_like(one, dtype=torch.int64)
    assert bool(torch.isnan(one).all())
    assert bands.kept()
    two.untyped_storage()[BAND_BYTES + two.nbytes] = 1
    assert not bands.kept()


@pytest.mark.parametrize("side", [-1, 1])
def test_a_write_beside_a_copy_shows(side: int) -> None:
    bands = Bands()
    copy = bands.copy(X)
    assert torch.equal(copy, X)
    assert bands.kept()
    copy.zero_()
    assert bands.kept()
    place = copy.storage_offset() + (-1 if side < 0 else copy.numel())
    torch.as_strided(copy, (1,), (1,), place).fill_(0.0)
    assert not bands.kept()


def test_bands_leave_what_is_not_contiguous_alone() -> None:
    bands = Bands()
    assert bands.copy(X.t()) is not None
    assert bands.copy(X.t()).data_ptr() == X.data_ptr()
    assert bands.copy(torch.empty(0)).numel() == 0


PROGRAM = """
import os, sys, subprocess, ctypes, socket
sys.path.insert(0, {root!r})
from verification.workers.audit import ProcessAudit
audit = ProcessAudit()
open("/proc/self/status").close()
with audit.listening():
    {code}
print(audit.asked)
"""


@pytest.mark.parametrize(
    ("code", "seen"),
    [
        ("subprocess.run(['true'])", "subprocess.Popen"),
        ("os.system('true')", "os.system"),
        ("os.fork() or os._exit(0)", "os.fork"),
        ("ctypes.CDLL('libc.so.6')", "ctypes.dlopen libc.so.6"),
        ("open('/proc/self/maps').close()", "open /proc/self/maps"),
        ("socket.socket(socket.AF_UNIX).bind('')", "socket.bind"),
        ("open('/etc/hostname').close(); sum(range(9)); import json", ""),
    ],
)
def test_what_python_code_asks_the_system_for(code: str, seen: str) -> None:
    """In a process of its own: a hook cannot be taken off."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    program = PROGRAM.format(root=root, code=code)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if seen:
        assert seen in done.stdout
    else:
        assert done.stdout.strip() == "[]"
