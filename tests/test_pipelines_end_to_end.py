"""The true command with nothing replaced, at the smallest size that shows everything, and killed.

When it is killed is drawn anew each time. OPS6K_KILL_SEED, which a failure shows, draws the same
again.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from benchmarks.record import record
from schemas.codec import content_id

SEED = "OPS6K_KILL_SEED"
MEASURED = {
    "admissions": ("problem_id",),
    "verdicts": ("problem_id", "solution_id", "effort"),
    "trajectories": ("problem_id", "kind"),
}
"""Kinds of measurements in the store, and what there is one of."""

LAST_PIECE = 12
"""Of 16 pieces of work, builds included, or 22: on a quiet machine one problem is too fast. The
others take seconds on any machine."""


@pytest.fixture
def moments() -> random.Random:
    """Draws when to kill; pytest shows what a test that fails has printed."""
    seed = int(os.environ.get(SEED) or int.from_bytes(os.urandom(4), "big"))
    print(f"{SEED}={seed}")
    return random.Random(seed)


def command(folder: Path, target: str, *more: str) -> list[str]:
    flags = [f"--target={target}", f"--output={folder}", "--num_problems=4", "--seed=0", *more]
    return [sys.executable, "-m", "pipelines.ops6k", *flags]


def finish(folder: Path, target: str, *more: str) -> str:
    done = subprocess.run(
        command(folder, target, *more), capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def kill_when(folder: Path, due: Callable[[], bool], look_s: float = 0.2) -> None:
    """Start the command and kill -9 its whole process group as soon as `due` holds."""
    log = folder.with_name(f"{folder.name}.log")
    with log.open("w") as said:
        process = subprocess.Popen(
            command(folder, "cpu", "--num_workers_local=2"),
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + 600
            while not due() and process.poll() is None:
                assert time.monotonic() < deadline, "not due after ten minutes"
                time.sleep(look_s)  # looking takes time from what is measured
            assert process.poll() is None, f"ended before it was killed:\n{log.read_text()}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    time.sleep(2)  # sandboxed children notice that their parents are gone


def stored(folder: Path) -> dict[str, int]:
    """Every finished measurement and build, by the moment it was written: again would move it."""
    store = folder / ".store"
    files = [file for kind in MEASURED for file in (store / kind).rglob("*.json")]
    # A build is finished when its folder has its name.
    built = (store / "cache" / "builds").glob("*/solution.so")
    files += [file for file in built if file.parent.suffix != ".tmp"]
    return {str(file): file.stat().st_mtime_ns for file in files}


def later(folder: Path, pieces: int, seconds: float) -> Callable[[], bool]:
    """Whether so many seconds passed since so many pieces of work; sooner where work is so fast
    that the run might end meanwhile."""
    reached: list[float] = []

    def due() -> bool:
        finished = len(stored(folder))
        if finished >= pieces:
            reached.append(time.monotonic())
        return finished >= LAST_PIECE or bool(reached and reached[-1] - reached[0] >= seconds)

    return due


def last_work(folder: Path) -> tuple[int, int]:
    """When a build was last started and a timing last ended, also if the result was not kept."""
    store = folder / ".store"
    builds, timings = store / "cache" / "builds", store / "lease.log"
    return builds.stat().st_mtime_ns, timings.stat().st_mtime_ns


def exported(folder: Path) -> int:
    """How many files of the dataset are there."""
    documents = [folder / name for name in ("run.json", "report.html", "README.md")]
    return sum(file.exists() for file in documents) + len([*folder.glob("data/*/*.parquet")])


def measured_twice(folder: Path) -> list[tuple[Any, ...]]:
    """What was measured again under another key."""
    found: Counter[tuple[Any, ...]] = Counter()
    for kind, names in MEASURED.items():
        for file in (folder / ".store" / kind).rglob("*.json"):
            row = json.loads(file.read_text())
            found[kind, *(row[name] for name in names)] += 1
    return [what for what, times in found.items() if times > 1]


def problem_ids(folder: Path) -> set[str]:
    return set(datasets.load_dataset(str(folder), "problems", split="train")["problem_id"])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_killed_at_random_moments_ends_as_if_it_had_not_been(
    tmp_path: Path, moments: random.Random
) -> None:
    folder = tmp_path / "killed"
    # While it starts up: until the first admission it takes 18 to 28 s.
    seconds = moments.uniform(0, 25)
    # While it measures: pieces of work take up to 25 s.
    pieces, more = moments.randint(1, LAST_PIECE), moments.uniform(0, 8)
    # While it exports: 16 files, of which the card is the last.
    files = moments.randint(1, 15)
    print(f"killed after {seconds:.1f} s, {pieces} pieces and {more:.1f} s, {files} files")
    kill_when(folder, later(folder, 0, seconds))
    first = stored(folder)
    kill_when(folder, later(folder, pieces, more))
    second = stored(folder)
    assert not exported(folder)
    kill_when(folder, lambda: exported(folder) >= files, look_s=0.01)
    third, done = stored(folder), last_work(folder)
    text = finish(folder, "cpu", "--num_workers_local=2")
    assert first.items() <= second.items() <= third.items()
    assert not measured_twice(folder)
    assert any(file.endswith("/solution.so") for file in third)
    assert "4 candidates = " in text
    measured = record(folder)["trajectories"]
    assert len(measured) == json.loads((folder / "run.json").read_text())["trajectories"]
    assert all(len(row["samples_ms"]["eager"]) >= 6 for row in measured if "status" in row)

    finish(tmp_path / "replayed", "cpu", f"--store={folder}/.store", "--num_workers_local=1")
    assert (stored(folder), last_work(folder)) == (third, done)
    assert problem_ids(tmp_path / "replayed") == problem_ids(folder)
    for file in sorted((folder / "data").rglob("*.parquet")):
        other = tmp_path / "replayed" / file.relative_to(folder)
        assert other.read_bytes() == file.read_bytes()


def tiny_run(folder: Path, kill_before: str = "") -> subprocess.CompletedProcess[str]:
    """The command over stages of a few lines, in one process that can kill itself."""
    flags = [f"--output={folder}", "--target=cpu", "--num_problems=12", "--num_workers_local=1"]
    return subprocess.run(
        [sys.executable, "-m", "tests.tiny_run", *flags],
        capture_output=True,
        text=True,
        timeout=120,
        start_new_session=True,  # it kills its process group
        env=os.environ | {"TINY_KILL_BEFORE": kill_before},
    )


def test_a_run_killed_while_it_claims_works_and_exports_is_finished(
    tmp_path: Path, moments: random.Random
) -> None:
    """With stages of a few lines, because each moment costs a start of the command."""
    folder, before = tmp_path / "out", dict[str, int]()
    # How many changes a phase has: 12 in a new folder; 120, of which each kill leaves some; 27.
    limits = (
        ("claim", 12),
        ("claim", 9),
        ("work", 50),
        ("work", 50),
        ("export", 27),
        ("export", 27),
    )
    for phase, limit in limits:
        moment = f"{phase}:{moments.randint(1, limit)}"
        print(f"killed before {moment}")
        done = tiny_run(folder, moment)
        assert done.returncode == -signal.SIGKILL, f"{moment}:\n{done.stdout}{done.stderr}"
        after = stored(folder)
        assert before.items() <= after.items()
        before = after
    done = tiny_run(folder)
    assert "12 candidates = 9 kept + 3 rejected" in done.stdout, done.stdout + done.stderr
    assert stored(folder) == before
    rows = [line for file in folder.glob("problems/*.jsonl") for line in file.open()]
    kept = {content_id(str(index)) for index in range(12) if index not in (3, 5, 7)}
    assert {json.loads(row)["problem_id"] for row in rows} == kept
    lines = [line.split()[:2] for line in (folder / "done.log").open()]
    assert len(lines) == len({tuple(line) for line in lines})


@pytest.mark.gpu
@pytest.mark.timeout(1200)
def test_the_same_command_on_a_gpu(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    finish(folder, "cuda", "--num_workers_local=4")
    run = json.loads((folder / "run.json").read_text())
    assert run["settings"]["target"] == "cuda"
    assert run["device"]["driver"] is not None
    assert run["results"]["reference"]["correct"] > 0
