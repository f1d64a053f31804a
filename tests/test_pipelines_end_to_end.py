"""The true command with nothing replaced, at the smallest size that shows everything."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import datasets
import pytest

from benchmarks.record import record
from runtime.store import Store


def command(folder: Path, target: str, *more: str) -> list[str]:
    flags = [f"--target={target}", f"--output={folder}", "--num_problems=4", "--seed=0", *more]
    return [sys.executable, "-m", "pipelines.ops6k", *flags]


def finish(folder: Path, target: str, *more: str) -> str:
    done = subprocess.run(
        command(folder, target, *more), capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def kill_after(folder: Path, target: str, kind: str, count: int) -> None:
    """Start the command and kill -9 its whole process group once so much work is finished."""
    process = subprocess.Popen(
        command(folder, target, "--num_workers_local=2"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    store, deadline = Store(f"{folder}/.store"), time.monotonic() + 600
    while store.count(kind) < count and process.poll() is None:
        assert time.monotonic() < deadline, f"fewer than {count} {kind} after ten minutes"
        time.sleep(0.2)
    assert process.poll() is None, "the run ended before it could be killed"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(2)  # sandboxed children notice that their parents are gone


def stored(folder: Path) -> dict[str, int]:
    """Every finished measurement, by the moment it was written: measuring again would move it."""
    kinds = ("admissions", "verdicts", "trajectories")
    files = (file for kind in kinds for file in (folder / ".store" / kind).rglob("*.json"))
    return {str(file): file.stat().st_mtime_ns for file in files}


def problem_ids(folder: Path) -> set[str]:
    return set(datasets.load_dataset(str(folder), "problems", split="train")["problem_id"])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_killed_twice_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    kill_after(folder, "cpu", "admissions", 1)
    first = stored(folder)
    assert not (folder / "README.md").exists()
    kill_after(folder, "cpu", "verdicts", 1)
    second = stored(folder)
    text = finish(folder, "cpu", "--num_workers_local=2")
    third = stored(folder)
    assert first.items() <= second.items() <= third.items()
    assert "4 candidates = " in text
    measured = record(folder)["trajectories"]
    assert len(measured) == json.loads((folder / "run.json").read_text())["trajectories"]
    assert all(len(row["samples_ms"]["eager"]) >= 6 for row in measured if "status" in row)

    finish(tmp_path / "replayed", "cpu", f"--store={folder}/.store", "--num_workers_local=1")
    assert stored(folder) == third
    assert problem_ids(tmp_path / "replayed") == problem_ids(folder)
    for file in sorted((folder / "data").rglob("*.parquet")):
        other = tmp_path / "replayed" / file.relative_to(folder)
        assert other.read_bytes() == file.read_bytes()


@pytest.mark.gpu
@pytest.mark.timeout(1200)
def test_the_same_command_on_a_gpu(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    finish(folder, "cuda", "--num_workers_local=4")
    run = json.loads((folder / "run.json").read_text())
    assert run["settings"]["target"] == "cuda"
    assert run["device"]["driver"] is not None
    assert run["results"]["reference"]["correct"] > 0
