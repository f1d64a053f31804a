"""Exclusive is exclusive across processes, a dead holder frees it, and a writer is not starved."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from runtime.lease import OPENINGS, DeviceLease, held_seconds, holds, physical_name

HOLD = """
import sys, time
from runtime.lease import DeviceLease
lease = DeviceLease("dev", folder=sys.argv[1])
with getattr(lease, sys.argv[2])():
    print("held", flush=True)
    time.sleep(float(sys.argv[3]))
"""


def _holder(folder: Path, how: str, seconds: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), how, str(seconds)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def _free(lease: DeviceLease, how: str, within_s: float) -> bool:
    done = threading.Event()

    def take() -> None:
        with getattr(lease, how)():
            done.set()

    threading.Thread(target=take, daemon=True).start()
    return done.wait(within_s)


def test_a_timing_keeps_everyone_out_until_its_process_dies(tmp_path: Path) -> None:
    lease = DeviceLease("dev", folder=str(tmp_path))
    holder = _holder(tmp_path, "exclusive", 60)
    assert not _free(lease, "shared", 0.3)
    assert not _free(lease, "exclusive", 0.3)
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert _free(lease, "exclusive", 10)


def test_shared_work_runs_side_by_side_and_keeps_a_timing_out(tmp_path: Path) -> None:
    lease = DeviceLease("dev", folder=str(tmp_path))
    holder = _holder(tmp_path, "shared", 60)
    assert _free(lease, "shared", 10)
    assert not _free(lease, "exclusive", 0.3)
    holder.kill()
    holder.wait()


def test_a_waiting_timing_goes_before_later_shared_work(tmp_path: Path) -> None:
    lease = DeviceLease("dev", folder=str(tmp_path))
    order: list[str] = []
    with lease.shared():

        def take(how: str) -> None:
            with getattr(lease, how)():
                order.append(how)
                time.sleep(0.05)

        writer = threading.Thread(target=take, args=("exclusive",))
        writer.start()
        time.sleep(0.3)
        reader = threading.Thread(target=take, args=("shared",))
        reader.start()
        time.sleep(0.3)
        assert order == []
    writer.join()
    reader.join()
    assert order == ["exclusive", "shared"]


def test_the_log_adds_up(tmp_path: Path) -> None:
    log = tmp_path / "lease.log"
    lease = DeviceLease("dev", log=str(log), folder=str(tmp_path))
    for _ in range(2):
        with lease.exclusive():
            time.sleep(0.05)
    with lease.shared():
        pass
    assert len(log.read_text().splitlines()) == 2
    assert 0.1 <= held_seconds(str(log)) < 5
    assert held_seconds(str(log), since=time.time()) == 0
    assert held_seconds(str(tmp_path / "none")) == 0
    with open(log, "a") as file:  # a second device: seconds are a device's, not their sum
        file.write(f"{time.time():.6f}\t9.0\t0.0\tother\n")
    assert 4.55 <= held_seconds(str(log)) < 7
    assert [len(rows) for rows in holds(str(log)).values()] == [2, 1]


def test_devices_are_opened_a_few_at_a_time_beside_shared_work(tmp_path: Path) -> None:
    lease = DeviceLease("dev", folder=str(tmp_path))
    holders = [_holder(tmp_path, "opening", 60) for _ in range(OPENINGS - 1)]
    assert _free(lease, "opening", 10)
    holders.append(_holder(tmp_path, "opening", 60))
    assert not _free(lease, "opening", 0.3)
    assert _free(lease, "shared", 10)
    holders[1].kill()
    holders[1].wait()
    assert _free(lease, "opening", 10)
    assert not _free(lease, "exclusive", 0.3)
    for holder in holders:
        holder.kill()
        holder.wait()
    assert _free(lease, "exclusive", 10)


def test_timings_that_wait_together_go_in_one_go(tmp_path: Path) -> None:
    lease = DeviceLease("dev", folder=str(tmp_path))
    order: list[str] = []

    def take(how: str) -> None:
        with getattr(lease, how)():
            order.append(how)
            time.sleep(0.05)

    threads = []
    with lease.shared():
        for how in ("exclusive", "shared", "exclusive"):
            threads.append(threading.Thread(target=take, args=(how,)))
            threads[-1].start()
            time.sleep(0.2)
        assert order == []
    for thread in threads:
        thread.join()
    assert order == ["exclusive", "exclusive", "shared"]


@pytest.mark.parametrize(
    ("shown", "device", "name"),
    [
        (None, "cpu", "cpu"),
        ("0,1", "cpu", "cpu"),
        (None, "cuda:1", "cuda-1"),
        ("3", "cuda:0", "cuda-3"),
        ("2, 5", "cuda:1", "cuda-5"),
        ("GPU-ab", "cuda:0", "cuda-GPU-ab"),
    ],
)
def test_two_views_of_a_gpu_have_one_lease(
    monkeypatch: pytest.MonkeyPatch, shown: str | None, device: str, name: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert physical_name(device) == name
