"""The doctor's table says what is missing, why, and what to do."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from pipelines import doctor
from runtime.view import ROOT
from schemas.records import Isolation
from verification.machine import Machine

NOTHING = Isolation(network=False, user=False, limits=False)


def test_every_part_has_advice_and_a_reason() -> None:
    rows = list(doctor.isolation_rows(NOTHING, {"view": "no mounts", "processes": "EPERM"}))
    assert [row.name for row in rows] == [field.name for field in fields(Isolation)]
    assert all(row.good is False and row.todo for row in rows)
    found = {row.name: row.found for row in rows}
    assert found["filesystem"] == "no mounts"
    assert found["processes"] == "EPERM"
    assert NOTHING.missing == tuple(found)


def test_what_was_taken_away_needs_no_advice() -> None:
    parts = {field.name: True for field in fields(Isolation)}
    isolation = Isolation(**parts)
    assert isolation.full
    assert not isolation.missing
    assert all(row.good and not row.todo for row in doctor.isolation_rows(isolation, {}))
    partial = Isolation(**{**parts, "syscalls": False})
    assert not partial.full
    assert partial.missing == ("syscalls",)


def test_compilers_are_those_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    doctor.toolchain.cache_clear()
    good = {row.name: row for row in doctor.compiler_rows()}
    assert good["--target=cpu"].good
    doctor.toolchain.cache_clear()
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    try:
        bad = {row.name: row for row in doctor.compiler_rows()}
    finally:
        doctor.toolchain.cache_clear()
    assert bad["--target=cpu"].good is False
    assert "g++" in bad["--target=cpu"].found
    assert bad["--target=cuda"].good is None


def test_gpus_are_listed_or_said_to_be_none() -> None:
    def none() -> str:
        raise FileNotFoundError("nvidia-smi")

    (row,) = doctor.gpu_rows(none)
    assert row.good is None
    rows = list(doctor.gpu_rows(lambda: "NVIDIA H200, 580.95.05, 143771 MiB\n"))
    assert rows[0].found == "NVIDIA H200, 580.95.05, 143771 MiB"
    assert (len(rows) == 2) is not Path("/dev/nvidia-uvm").exists()


def test_cupti_is_header_and_library(tmp_path: Path) -> None:
    assert "header and library" in doctor.cupti_row(tmp_path).found
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cupti.h").touch()
    assert doctor.cupti_row(tmp_path).found.startswith("no library")
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libcupti.so.13").touch()
    assert doctor.cupti_row(tmp_path).good
    (tmp_path / "include" / "cupti.h").unlink()
    assert doctor.cupti_row(tmp_path).found.startswith("no header")


def test_sampling_that_the_kernel_refuses_is_for_those_who_time_a_cpu() -> None:
    assert doctor.sampling_row("").good
    refused = doctor.sampling_row("perf_event_open: not permitted")
    assert refused.good is None and "perf_event_paranoid" in refused.todo


def test_small_memory_folders_are_said(tmp_path: Path) -> None:
    assert doctor.memory_row(tmp_path, 1).good
    row = doctor.memory_row(tmp_path, 1 << 60)
    assert row.good is False
    assert "--shm-size" in row.todo
    assert doctor.memory_row(tmp_path / "missing").good is False


def test_a_row_is_a_line_and_advice_another() -> None:
    rows = [
        doctor.Row(name="a", good=True, found="x\n y", todo="not needed"),
        doctor.Row(name="long", good=False, found="why", todo="do this"),
    ]
    lines = doctor.table(rows).splitlines()
    assert lines == ["a     yes  x y", "long  NO   why", "           -> do this"]


def test_a_worker_keeps_subnormals(cpu_machine: Machine) -> None:
    worker = cpu_machine.spawn("pipelines.doctor:handlers", "solution")
    seen = worker.call("look", 60)
    worker.close()
    assert doctor.arithmetic_row(seen["flushes_subnormals"]).good
    assert doctor.arithmetic_row(True).good is False
    assert set(seen["isolation"]) == {field.name for field in fields(Isolation)}


def test_the_command_prints_and_its_exit_code_is_the_answer() -> None:
    command = [sys.executable, "-m", "pipelines.doctor"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    lines = done.stdout.splitlines()
    parts = {line.split()[0]: line.split()[1] for line in lines[1:7]}
    assert set(parts) == {field.name for field in fields(Isolation)}, done.stderr
    assert done.returncode == (0 if set(parts.values()) == {"yes"} else 1)
