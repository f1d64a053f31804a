"""CPU time by file, of real processes that burn it in known places."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from verification.sampling import UNKNOWN, Sampler, shares

BURN = """
#include <thread>
extern "C" double burn(double x, long n) {
    for (long i = 0; i < n; ++i) x = x * 1.0000001 + 1e-9;
    return x;
}
extern "C" double burn_in_thread(double x, long n) {
    std::thread t([&] { x = burn(x, n); });
    t.join();
    return x;
}
"""
RUN = "import ctypes; f = ctypes.CDLL({path!r}).{name}; f.restype = ctypes.c_double\n"
LOOP = "f(ctypes.c_double(1.0), ctypes.c_long(20_000_000))"
TORCH = "import torch; x = torch.randn(512, 512)\n"
NEEDS = "needs a kernel that lets us sample our own processes"


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("own") / "own.so"
    command = ["g++", "-O2", "-x", "c++", "-fPIC", "-shared", "-", "-o", str(library)]
    subprocess.run(command, input=BURN, text=True, check=True)
    return library


@contextlib.contextmanager
def _running(setup: str, loop: str) -> Iterator[int]:
    """A process that does `loop` over and over."""
    code = f"{setup}\nprint('ready', flush=True)\nwhile True: {loop}"
    one = {**os.environ, "OMP_NUM_THREADS": "1"}  # threads that wait would spin in libgomp
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, env=one, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process.pid
    finally:
        process.kill()
        process.wait()


def _sampled(pid: int, seconds: float = 0.4, times: int = 1) -> Sampler:
    sampler = Sampler(pid)
    for _ in range(times):
        with sampler:
            time.sleep(seconds)
    if "does not let us" in sampler.refused:
        pytest.skip(f"{NEEDS}: {sampler.refused}")
    return sampler


def test_own_work_is_in_the_own_library(own: Path) -> None:
    with _running(RUN.format(path=str(own), name="burn"), LOOP) as pid:
        sampler = _sampled(pid)
    report = sampler.report()
    assert report is not None
    assert sum(report.values()) > 50
    in_own, foreign = shares(report, own)
    assert in_own > 0.9
    assert foreign < 0.05
    coverage = sampler.coverage()
    assert coverage is None or 0.6 < coverage < 1.4
    assert sampler.lost == 0


def test_the_librarys_work_is_foreign(own: Path) -> None:
    with _running(TORCH, "torch.mm(x, x)") as pid:
        report = _sampled(pid, 1.0).report()
    assert report is not None
    in_own, foreign = shares(report, own)
    assert in_own == 0.0
    assert foreign > 0.5
    top = max((file for file in report if "libtorch" in file), key=lambda file: report[file])
    assert report[top] > 50


def test_both_sides_show_and_blocks_add_up(own: Path) -> None:
    setup = TORCH + RUN.format(path=str(own), name="burn")
    loop = f"torch.mm(x, x); {LOOP.replace('20_000_000', '1_000_000')}"
    with _running(setup, loop) as pid:
        report = _sampled(pid, 0.4, times=3).report()
    assert report is not None
    in_own, foreign = shares(report, own)
    assert in_own > 0.05
    assert foreign > 0.05


def test_work_in_threads_that_come_later_is_seen(own: Path) -> None:
    with _running(RUN.format(path=str(own), name="burn_in_thread"), LOOP) as pid:
        sampler = _sampled(pid, 1.0)  # a thread lives for some 50 ms
    report = sampler.report()
    assert report is not None
    assert shares(report, own)[0] > 0.8
    coverage = sampler.coverage()
    assert coverage is not None
    assert 0.6 < coverage < 1.4


def test_samples_without_room_are_counted(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verification.sampling.RING_PAGES", 1)
    with _running(RUN.format(path=str(own), name="burn"), LOOP) as pid:
        sampler = Sampler(pid, frequency=5000)
        with sampler:
            time.sleep(0.6)
    if sampler.refused:
        pytest.skip(f"{NEEDS}: {sampler.refused}")
    report = sampler.report()
    assert report is not None
    assert 100 < sum(report.values()) <= 4096 // 24
    coverage = sampler.coverage()
    assert coverage is not None
    assert coverage < 0.5


def test_a_process_that_is_gone_gives_a_reason() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    sampler = Sampler(process.pid)
    with sampler:
        pass
    assert sampler.report() is None
    assert sampler.coverage() is None
    assert str(process.pid) in sampler.refused


def test_a_refusal_of_the_kernel_is_told(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root, to become somebody who may not")
    code = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).resolve().parent.parent)!r})
from verification.sampling import Sampler
os.setgid(65534); os.setuid(65534)
with Sampler({os.getpid()}) as sampler:
    pass
assert sampler.report() is None
print(sampler.refused)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "perf_event_paranoid" in done.stdout, done.stderr


def test_shares_by_name_and_place(tmp_path: Path) -> None:
    own = tmp_path / "own.so"
    report = {
        str(own): 40,
        "/usr/lib/x86_64-linux-gnu/libm.so.6": 10,
        "/usr/lib/x86_64-linux-gnu/libgomp.so.1": 10,
        f"{sys.base_prefix}/bin/python3.11": 5,
        "[vdso]": 5,
        f"{sys.prefix}/lib/python3/site-packages/torch/lib/libtorch_cpu.so": 15,
        "/tmp/scratch/libm.so.6": 10,  # not the system's
        UNKNOWN: 5,
    }
    assert shares(report, own) == (0.4, 0.3)
    assert shares({}, own) == (0.0, 0.0)
