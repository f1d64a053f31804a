"""Everything that is refused before work starts, and the texts a user then reads."""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kernel_agent.policies import POLICIES
from pipelines import options, output, runner
from pipelines.options import RunConfig, UsageError
from schemas.records import SCHEMA_VERSION, Target
from training_export.rules import SftRule
from verification.building.toolchain import toolchain


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--num_problem=5"], "unknown argument '--num_problem'; did you mean --num_problems?"),
        (["--num_problem", "5"], "unknown argument '--num_problem'; did you mean --num_problems?"),
        (["--max_num_worker=5"], "unknown argument '--max_num_worker'; did you mean --max_num_w"),
        (["stray"], "unknown argument 'stray'"),
        (["--target=cud"], "--target=cud: expected one of auto, cpu, cuda; did you mean cuda?"),
        (["--policy=xpert"], "--policy=xpert: expected one of expert; did you mean expert?"),
        (["--near_misses=hold"], "--near_misses=hold: expected one of drop, keep"),
        (["--sft=faster"], "--sft=faster: expected one of correct, faster_than_eager, faster_"),
        (["--runner=DirectRuner"], "did you mean DirectRunner?"),
        (["--runner=DaskRunner"], "--runner=DaskRunner is refused: Beam's Dask runner"),
        (["--num_problems=0"], "--num_problems must be 1 or more, got 0"),
        (["--num_problems=-3"], "--num_problems must be 1 or more, got -3"),
        (["--num_problems=many"], "argument --num_problems: invalid int value: 'many'"),
        (["--seed=-1"], "--seed must lie in [0, 2**63), got -1"),
        (["--problem_timeout_s=0"], "--problem_timeout_s must be positive, got 0.0"),
        (["--memory_limit_gib=nan"], "--memory_limit_gib must be positive, got nan"),
        (["--num_workers_local=-1"], "--num_workers_local must be 0 or more, got -1"),
        (["--output="], "--output must name a folder"),
        (["--direct_num_workers=4"], "--direct_num_workers is set by this command: use --num_wor"),
        (["--max_num_workers=x"], "Beam: argument --max_num_workers: invalid int value: 'x'"),
        (["--runner=FlinkRunner"], "--target=auto looks at this machine, but FlinkRunner works on"),
        (["--runner=DataflowRunner", "--target=cuda", "--output=out"], "name a bucket, gs://"),
    ],
)
def test_a_wrong_command_line_is_refused_with_what_to_do(argv: list[str], expected: str) -> None:
    with pytest.raises(UsageError) as error:
        options.parse(argv)
    assert expected in str(error.value)


def test_our_flags_are_read_and_beams_pass_through() -> None:
    config, beam_flags = options.parse(
        ["--num_problems", "7", "--seed=3", "--dry_run", "--max_num_workers=2", "--project", "p"]
    )
    assert (config.num_problems, config.seed, config.dry_run) == (7, 3, True)
    assert beam_flags == ["--max_num_workers=2", "--project", "p"]


def test_every_setting_has_a_sentence_and_sft_names_the_rules_there_are() -> None:
    text = options.field_help()
    assert set(text) == {field.name for field in dataclasses.fields(RunConfig)}
    assert all(sentence.endswith(".") for sentence in text.values())
    with pytest.raises(UsageError, match=", ".join(SftRule)):
        options.parse(["--sft=none"])
    with pytest.raises(UsageError, match=", ".join(POLICIES)):
        options.parse(["--policy=none"])


@pytest.mark.parametrize(
    ("target", "gpu", "nvcc", "expected"),
    [
        ("auto", False, False, Target.CPU),
        ("auto", False, True, Target.CPU),
        ("auto", True, False, Target.CPU),
        ("auto", True, True, Target.CUDA),
        ("cpu", True, True, Target.CPU),
    ],
)
def test_auto_needs_both_a_gpu_and_nvcc(
    target: str, gpu: bool, nvcc: bool, expected: Target
) -> None:
    assert options.resolve_target(target, gpu, nvcc) is expected


def _command(argv: list[str], path: str | None = None) -> subprocess.CompletedProcess[str]:
    """The real command, in a process of its own, so that `PATH` is what the checks see."""
    environment = {k: v for k, v in os.environ.items() if k != "CXX"}
    return subprocess.run(
        [sys.executable, "-m", "pipelines.ops6k", *argv],
        env=environment | ({"PATH": path} if path is not None else {}),
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_missing_compiler_ends_the_command_before_anything_is_written(tmp_path: Path) -> None:
    done = _command([f"--output={tmp_path}/out", "--target=cpu"], path=str(tmp_path))
    assert done.returncode == 2
    assert "install g++" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", ["auto", "cuda"])
def test_nvcc_without_a_compiler_of_the_host_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text('#!/bin/sh\n[ "$1" = --version ]  # so all that compiles fails\n')
    nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    toolchain.cache_clear()
    with pytest.raises(UsageError, match=r"expected a C\+\+ compiler for nvcc.*install g\+\+"):
        options.check_machine(_config(tmp_path, target=target), gpu=True)


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="needs a machine without a GPU")
def test_cuda_without_a_gpu_is_refused(tmp_path: Path) -> None:
    done = _command([f"--output={tmp_path}/out", "--target=cuda"])
    assert done.returncode == 2
    assert "--target=cuda needs an NVIDIA GPU" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--runner=DataflowRunner"], ["option: project.", "option: temp_location."]),
        (["--runner=DataflowRunner", "--dry_run"], ["option: project."]),
        (["--runner=FlinkRunner", "--environment_type=PROCESS"], ["process_command is required"]),
        (["--environment_type=PROCESS"], ["DirectRunner", "process_command is required"]),
        (["--resource_hint=min_ram=x"], ["Resource hint min_ram has invalid value x."]),
        (["--type_check_additional=x"], ["Unrecognized --type_check_additional feature: x"]),
    ],
)
def test_what_beam_has_against_its_flags_is_said_before_anything_starts(
    flags: list[str], expected: list[str]
) -> None:
    config, beam_flags = options.parse(["--output=memory://out", "--target=cpu", *flags])
    with pytest.raises(UsageError) as error:
        runner.prepare(config, beam_flags)
    assert all(text in str(error.value) for text in expected)
    assert "\n" not in str(error.value)


def test_flags_that_beam_accepts_leave_nothing_behind_until_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    runner.prepare(RunConfig(target="cpu"), [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flag", ["--runner=DataflowRunner", "--resource_hint=min_ram=x"])
def test_flags_that_beam_refuses_end_the_command_before_anything_is_written(
    tmp_path: Path, flag: str
) -> None:
    done = _command([f"--output=file://{tmp_path}/out", "--target=cpu", flag])
    assert done.returncode == 2
    assert f"Beam cannot use {'Data' if 'Data' in flag else 'Direct'}" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_dry_run_prints_the_plan_and_writes_nothing(tmp_path: Path) -> None:
    done = _command([f"--output={tmp_path}/out", "--target=cpu", "--dry_run", "--num_problems=9"])
    assert done.returncode == 0
    assert "9 candidates, seed 0, target cpu" in done.stdout
    assert not (tmp_path / "out").exists()


def _config(folder: Path, **changes: object) -> RunConfig:
    return dataclasses.replace(RunConfig(output=str(folder), num_problems=10), **changes)  # type: ignore[arg-type]


def test_a_new_or_empty_folder_is_claimed_and_the_same_run_continues(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "new" / "deep", tmp_path / "empty"):
        assert output.claim(_config(folder), Target.CPU) is False
        assert output.claim(_config(folder), Target.CPU) is True


def test_the_number_of_problems_may_grow_but_not_shrink(tmp_path: Path) -> None:
    output.claim(_config(tmp_path), Target.CPU)
    assert output.claim(_config(tmp_path, num_problems=20), Target.CPU) is True
    with pytest.raises(UsageError, match="a run of 20 problems, and --num_problems may only grow"):
        output.claim(_config(tmp_path), Target.CPU)


@pytest.mark.parametrize(
    ("changes", "target", "expected"),
    [
        ({"seed": 1}, Target.CPU, r"seed=0 \(now 1\)"),
        ({}, Target.CUDA, r"target=cpu \(now cuda\)"),
        ({"sft": "correct"}, Target.CPU, r"sft=faster_than_eager \(now correct\)"),
    ],
)
def test_another_run_does_not_continue_in_the_folder(
    tmp_path: Path, changes: dict[str, object], target: Target, expected: str
) -> None:
    output.claim(_config(tmp_path), Target.CPU)
    with pytest.raises(UsageError, match=expected):
        output.claim(_config(tmp_path, **changes), target)


def test_settings_that_do_not_change_the_rows_may_differ(tmp_path: Path) -> None:
    output.claim(_config(tmp_path), Target.CPU)
    assert output.claim(_config(tmp_path, num_workers_local=7, verbose=True), Target.CPU) is True


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match=r"holds something else \(thesis.tex\)"):
        output.claim(_config(tmp_path), Target.CPU)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_another_schema_version_is_refused(tmp_path: Path) -> None:
    output.claim(_config(tmp_path), Target.CPU)
    marker = tmp_path / output.MARKER
    found = json.loads(marker.read_text())
    found["settings"]["schema_version"] = 0
    marker.write_text(json.dumps(found))
    with pytest.raises(UsageError, match=f"schema version 0, this is version {SCHEMA_VERSION}"):
        output.claim(_config(tmp_path), Target.CPU)


def test_a_file_or_an_unwritable_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is a file, expected a folder"):
        output.claim(_config(tmp_path / "file"), Target.CPU)
    with pytest.raises(UsageError, match="cannot be written"):
        output.claim(_config(Path("/proc/ops6k")), Target.CPU)
    with pytest.raises(UsageError, match="--store=/proc/ops6k cannot be written"):
        output.claim(_config(tmp_path / "out", store="/proc/ops6k"), Target.CPU)


def test_a_bucket_without_its_driver_says_what_to_install() -> None:
    config = RunConfig(output="adl://account/out")  # no driver of this one is in the lock file
    with pytest.raises(UsageError, match="adlfs"):
        output.check(config, Target.CPU)
