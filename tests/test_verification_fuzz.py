"""Hostile folders by the hundred: a verdict with a reason or one clear line, nothing else."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests import fuzz_folders
from verification.folder import FolderError
from verification.machine import Machine
from verification.service.pool_worker import Judges

READ, JUDGED = 250, 160


def test_reading_never_fails_otherwise(tmp_path: Path) -> None:
    ends: Counter[str] = Counter()
    for seed in range(READ):
        root = tmp_path / str(seed)
        problem, solution, _ = fuzz_folders.hostile(seed, root)
        try:
            fuzz_folders.read(problem, solution)
            ends["read"] += 1
        except FolderError as error:
            line = str(error)
            assert line.isprintable(), repr(line)
            assert ": expected " in line, line
            assert ", got " in line, line
            assert len(line) < 2000
            ends["unreadable"] += 1
        shutil.rmtree(root)
    # Neither are all cases harmless, nor does everything fall at the first fence.
    assert min(ends.values()) > READ // 4, ends


def test_cases_follow_from_their_seed(tmp_path: Path) -> None:
    one = fuzz_folders.hostile(3, tmp_path / "one")
    two = fuzz_folders.hostile(3, tmp_path / "two")
    assert one[2] == two[2]
    assert len({tuple(fuzz_folders.hostile(s, tmp_path / f"s{s}")[2]) for s in range(40)}) > 20


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_case_ends_in_a_verdict_or_a_clear_line(tmp_path: Path) -> None:
    machine = Machine(fuzz_folders.settings(tmp_path))
    judges = Judges(machine)
    ends: Counter[str] = Counter()
    try:
        for seed in range(JUDGED):
            root = tmp_path / f"case{seed}"
            problem, solution, _ = fuzz_folders.hostile(seed, root)
            ends[fuzz_folders.judge(judges, problem, solution)] += 1
            shutil.rmtree(root)
    finally:
        judges.close()
        machine.close()
    assert {"unreadable", "build_error", "runtime_error"} <= set(ends), ends
