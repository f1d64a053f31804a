"""The local run: what it does when stages fail, when workers die and when it is killed.

`tests/tiny_run.py` is the real command over stage functions of a few lines; what is tested here
is the graph, the runner and the store between them.
"""

from __future__ import annotations

import collections
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pipelines import spans, transforms
from pipelines.dead_letters import internal_error, is_internal
from pipelines.options import RunConfig
from pipelines.progress import Progress
from runtime.store import Store
from schemas.codec import content_id
from schemas.records import RejectStage


def command(folder: Path, *more: str) -> list[str]:
    flags = [f"--output={folder}", "--target=cpu", "--num_problems=12", *more]
    return [sys.executable, "-m", "tests.tiny_run", *flags]


def run(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(folder, *more), capture_output=True, text=True, timeout=120)


def start(folder: Path, *more: str, delay_s: float = 0.3) -> subprocess.Popen[str]:
    """The command in the background, in a process group of its own, with slow stages."""
    return subprocess.Popen(
        command(folder, *more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | {"TINY_DELAY_S": str(delay_s)},
    )


def wait_for(folder: Path, kind: str, count: int) -> None:
    """Until so many pieces of work of a kind are finished."""
    deadline = time.monotonic() + 60
    while Store(f"{folder}/.store").count(kind) < count:
        assert time.monotonic() < deadline, f"fewer than {count} {kind} after a minute"
        time.sleep(0.05)


def workers(driver: int) -> list[psutil.Process]:
    """The Beam worker processes of a driver."""
    children = psutil.Process(driver).children(recursive=True)
    return [child for child in children if child.name() != "sh"]


def work_done(folder: Path) -> collections.Counter[tuple[str, str]]:
    """How often each piece of work was finished; a kill between that and its line leaves none."""
    lines = (folder / "done.log").read_text().splitlines()
    return collections.Counter((line.split()[0], line.split()[1]) for line in lines)


def files_of(folder: Path) -> dict[str, str]:
    return {str(f.relative_to(folder)): f.read_text() for f in folder.rglob("*.jsonl")}


EXPECTED = {str(i) for i in range(12)} - {"3", "5", "7"}  # see tests/tiny_stages.py


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str, int]]:
    """A whole run in one process: its folder, what it printed, its exit code."""
    folder = tmp_path_factory.mktemp("one") / "out"
    done = run(folder, "--num_workers_local=1")
    yield folder, done.stdout + done.stderr, done.returncode


def test_every_candidate_is_kept_or_rejected_with_its_reason(
    finished: tuple[Path, str, int],
) -> None:
    folder, text, _ = finished
    kept = (folder / "problems/train-0.jsonl").read_text().splitlines()
    kept += (folder / "problems/validation-0.jsonl").read_text().splitlines()
    assert {str(json.loads(line)["index"]) for line in kept} == EXPECTED
    rejected = [json.loads(line) for line in (folder / "rejected/train-0.jsonl").open()]
    problems = {row["index"]: row for row in rejected if row["kind"] is None}
    assert {i: (r["stage"], r["reason"]) for i, r in problems.items()} == {
        3: ("compose", "too_large"),
        5: ("admit", "internal_error"),
        7: ("dedup", "duplicate"),
    }
    lost = {row["index"] for row in rejected if row["kind"] == "optimized"}
    assert lost == {1, 9, 11}
    assert "12 candidates = 9 kept + 3 rejected" in text


def test_a_bug_of_ours_costs_one_row_and_is_said_loudly(finished: tuple[Path, str, int]) -> None:
    folder, text, code = finished
    assert code == 1
    assert "1 rows were lost to errors of our own: 1 at admit" in text
    rejected = [json.loads(line) for line in (folder / "rejected/train-0.jsonl").open()]
    (row,) = (row for row in rejected if row["reason"] == "internal_error")
    assert row["problem_id"] == content_id("5")
    assert row["detail"].startswith("RuntimeError: the last line (")
    assert "tiny_stages.py:" in row["detail"]


def test_the_number_of_workers_changes_nothing(
    finished: tuple[Path, str, int], tmp_path: Path
) -> None:
    done = run(tmp_path / "out", "--num_workers_local=3")
    assert done.returncode == 1, done.stderr
    assert files_of(tmp_path / "out") == files_of(finished[0])
    assert set(work_done(tmp_path / "out").values()) == {1}
    pids = {line.split()[2] for line in (tmp_path / "out/done.log").read_text().splitlines()}
    assert len(pids) == 3


def test_a_dead_worker_restarts_the_run_and_nothing_is_done_twice(
    finished: tuple[Path, str, int], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    process = start(folder, "--num_workers_local=2")
    wait_for(folder, "admissions", 3)
    workers(process.pid)[-1].kill()
    text, _ = process.communicate(timeout=120)
    assert "a worker process died" in text
    assert "restart 1 of 3" in text
    assert "Traceback" not in text
    assert files_of(folder) == files_of(finished[0])
    assert set(work_done(folder).values()) == {1}


@pytest.mark.slow
def test_workers_that_keep_dying_end_the_run_with_a_message(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    process = start(folder, "--num_workers_local=2", "--num_problems=60", delay_s=1.0)
    killed: set[int] = set()
    while process.poll() is None and len(killed) < 20:
        if fresh := [
            w for w in workers(process.pid) if w.pid not in killed and w.cpu_times().user > 1
        ]:
            fresh[0].kill()
            killed.update(w.pid for w in fresh)
        time.sleep(0.2)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 70
    assert "died for the 4th time" in text
    assert "lower --num_workers_local or --memory_limit_gib" in text


@pytest.mark.slow
def test_a_run_killed_at_any_moment_is_finished_by_the_same_command(
    finished: tuple[Path, str, int], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    for kind, count in (
        ("candidates", 2),
        ("admissions", 1),
        ("admissions", 6),
        ("trajectories", 4),
    ):
        process = start(folder, "--num_workers_local=2")
        wait_for(folder, kind, count)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        time.sleep(3)  # workers whose driver is gone finish their element and end
        assert not (folder / "run.json").exists()
    done = run(folder, "--num_workers_local=2")
    assert "ops6k continues" in done.stdout
    assert files_of(folder) == files_of(finished[0])
    assert set(work_done(folder).values()) == {1}


def test_a_kill_of_the_whole_group_is_survived(
    finished: tuple[Path, str, int], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    process = start(folder, "--num_workers_local=1", delay_s=0.1)
    wait_for(folder, "admissions", 5)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = work_done(folder)
    run(folder, "--num_workers_local=1")
    assert files_of(folder) == files_of(finished[0])
    assert before <= work_done(folder)
    assert set(work_done(folder).values()) == {1}


def test_ctrl_c_stops_everything_and_says_how_to_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    process = start(folder, "--num_workers_local=2")
    wait_for(folder, "admissions", 1)
    children = workers(process.pid)
    assert len(children) == 2
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped; the same command continues" in text
    assert "restart" not in text
    assert not any(child.is_running() for child in children)


def test_an_error_in_a_stage_that_sees_the_whole_run_ends_it_with_code_1(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    done = run(folder, "--num_workers_local=1")  # makes the folder ours
    (folder / "problems/train-0.jsonl").unlink()
    (folder / "problems/train-0.jsonl").mkdir()  # what cannot be written over
    done = run(folder, "--num_workers_local=1")
    assert done.returncode == 1
    assert "the run failed" in done.stderr
    assert "IsADirectoryError" in done.stderr


def test_a_dead_letter_says_what_and_where() -> None:
    def fail() -> None:
        raise KeyError("one\ntwo")

    try:
        fail()
    except KeyError as error:
        row = internal_error(error, stage=RejectStage.EXPORT, problem_id="p", index=4, config="sft")
    assert row.reason == "sft.internal_error"
    assert row.detail.startswith("KeyError: ")
    assert "test_pipelines_runner.py:" in row.detail
    assert is_internal(row.reason)
    assert not is_internal("sft.not_correct")


def test_progress_counts_finished_files(tmp_path: Path) -> None:
    config = RunConfig(output=str(tmp_path))
    store = Store(config.store_root)
    for number in range(3):
        store.put("admissions", f"aa{number}", number)
    with Progress(config) as progress:
        assert progress.line() == "0 composed, 3 screened, 0 verdicts, 0 trajectories"


def test_a_stage_took_as_long_as_the_union_of_its_spans(tmp_path: Path) -> None:
    assert spans.covered([(0, 2), (1, 3), (5, 6), (5.5, 5.7)]) == 4
    log = str(tmp_path / "spans.log")
    with spans.span(log, "compose"):
        time.sleep(0.01)
    with pytest.raises(ValueError, match="x"), spans.span(log, "admit"):
        raise ValueError("x")
    found = spans.seconds_per_stage(log)
    assert list(found) == ["compose", "admit"]
    assert found["compose"] >= 0.01
    assert spans.seconds_per_stage(log, since=time.time() + 1) == {}


def test_hints_are_set_for_cuda_alone() -> None:
    assert transforms.device_hints(RunConfig(target="cpu")) == {}
    hints = transforms.device_hints(RunConfig(target="cuda", accelerator="type:x;count:1"))
    assert hints["accelerator"] == "type:x;count:1"
