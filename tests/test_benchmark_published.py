"""Kernels of others through our verifier: rows, flags, and the command at tiny size."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.published import __main__ as command
from benchmarks.published.records import (
    AUDITS,
    Expect,
    Published,
)
from benchmarks.published.running import Plan, answers
from benchmarks.published.table import guard_of, rightly, row_of, table
from tests import factories

pytest_plugins = ("tests.published_copies",)

VERDICT: dict[str, Any] = {
    "status": "correct", "reason": "", "labels": [], "effort": "reward", "harness": "h",
    "build_s": 1.0, "checks": [{}], "solution": {"median_ms": 1.0}, "eager": {"median_ms": 2.0},
    "compile": None, "attribution": {"own_share": 0.9, "foreign": ["sgemm"]},
    "speedup_eager": {"low": 1.9, "point": 2.0, "high": 2.1},
    "speedup_compile": {"low": 0.9, "point": 1.0, "high": 1.1}, "aa_control": None,
}  # fmt: skip
TIMELESS = {"speedup_eager": None, "speedup_compile": None}


def row(name: str = "k", verdict: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    published = Published(name=name, claimed=4.0, **changes)
    return row_of("cuda_l1", published, {"verdict": {**VERDICT, **(verdict or {})}, "seconds": 1.0})


def refused(reason: str, status: str = "integrity", **changes: Any) -> dict[str, Any]:
    return row(verdict={**TIMELESS, "status": status, "reason": reason}, **changes)


def test_a_row_holds_what_was_measured_and_nothing_of_the_text() -> None:
    made = row(files={"model_new.py": "SECRET"}, problem_code="SECRET")
    assert made["speedup_eager"] == [1.9, 2.0, 2.1] and made["own_share"] == 0.9
    assert made["ms"] == {"solution": 1.0, "eager": 2.0} and made["foreign"] == ["sgemm"]
    quoted = 'k.cu(3): error: "x" is undefined\n  SECRET line\n      ^\n1 error detected'
    broken = refused(quoted, status="build_error")
    assert broken["reason"] == 'k.cu(3): error: "x" is undefined | 1 error detected'
    assert "SECRET" not in json.dumps([made, broken])


def test_guards_are_told_from_other_reasons() -> None:
    assert guard_of("dispatch_audit: operators of torch did the work: aten.mm") == "dispatch_audit"
    assert guard_of("run: RuntimeError: no") is None and guard_of("") is None


@pytest.mark.parametrize(
    ("made", "right"),
    [
        (row(), None),
        (row(expect=Expect.HONEST), True),
        (refused("budget: off", "incorrect", expect=Expect.HONEST), False),
        (refused("attribution: others", expect=Expect.TORCH), True),
        (refused("aliases: shared", expect=Expect.TORCH), False),
        (refused("attribution: others", expect=Expect.TORCH, off=AUDITS), False),
        (row(expect=Expect.TORCH, off=AUDITS), True),
        (row(expect=Expect.WRONG), False),
        (row(expect=Expect.EXPLOIT), False),
        (refused("budget: off", "incorrect", expect=Expect.EXPLOIT), True),
        (refused("clocks_agree: 1 ms", "unmeasured", expect=Expect.EXPLOIT), True),
        (row(expect=Expect.EXPLOIT, off=AUDITS), False),  # twice as fast as eager
        (refused("", "reference_error", expect=Expect.EXPLOIT), None),
    ],
)
def test_what_is_a_right_decision(made: dict[str, Any], right: bool | None) -> None:
    assert rightly(made) is right


def test_a_trick_that_gains_nothing_may_pass_without_the_audits() -> None:
    slow = {"speedup_eager": {"low": 0.5, "point": 0.6, "high": 1.2}}
    assert rightly(row(verdict=slow, expect=Expect.EXPLOIT, off=AUDITS)) is True


def test_the_table_counts_and_compares() -> None:
    no_form = row_of("cuda_l1", Published(name="n", why_not="cupy"), {})
    rows = [row("a"), refused("dispatch_audit: mm", name="b"), no_form]
    said = table([*rows, refused("budget: off", "incorrect", expect=Expect.HONEST, name="d")])
    assert "decided, of 4:" in said and "1  refused: dispatch_audit" in said
    assert "geomean claimed 4.00x, measured 2.00x over eager" in said
    assert "decided rightly, all guards on: 0 of 1" in said and "wrongly: d" in said
    reviewed = table(rows, {"b": {"class": "not_own_work", "note": ""}})
    assert "not accepted: 2, read by hand: 1" in reviewed
    assert "1  not_own_work: b" in reviewed and "not yet read: n (no_form)" in reviewed


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--suite=cuda_l1"], "expected --peer_dir=…"),
        (["--peer_dir=x"], "expected --suite=…"),
        (["--suite=cuda_l1", "--peer_dir=/nowhere"], "expected --peer_dir to be a copy of github"),
        (["--suite=cuda_l1", "--peer_dir=DIR", "--workers=0"], "--workers of at least 1"),
        (["--suite=cuda_l1", "--peer_dir=DIR", "--libraries=mkl"], "--libraries of"),
        (["--suite=cuda_l1", "--peer_dir=DIR", "--only=no"], "found none that is asked"),
        (["--suite=cuda_l1", "--peer_dir=DIR", "--also=/no.json"], "of an earlier run"),
        (["--suite=cuda_l1", "--peer_dir=DIR", "--again=unmeasured"], "expected --also=…"),
        (["--suite=cuda_l1", "--peer_dir=DIR", "--also=x", "--again=slow"], "got slow"),
        (
            ["--suite=cuda_l1", "--peer_dir=DIR", "--target=cpu", "--json=/no/x.json"],
            "folder that exists",
        ),
        (["--review=/no.json"], "expected --json=…"),
        (["--review=/no.json", "--json=/no.json"], "expected a JSON file of an earlier run"),
    ],
)
def test_what_is_missing_is_said_before_anything_runs(
    flags: list[str], why: str, cuda_l1_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [flag.replace("DIR", str(cuda_l1_dir)) for flag in flags]
    try:
        code: Any = command.main(given)
    except SystemExit as exit:  # argparse's own
        code = exit.code
    said = capsys.readouterr()
    assert code == 2 and why in said.err and not said.out
    assert "Traceback" not in said.err


def test_a_review_is_for_names_and_classes_that_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, review = tmp_path / "run.json", tmp_path / "review.json"
    ours = refused("out_of_memory: 12 GiB", "reference_error", name="a")
    run.write_text(json.dumps({"rows": [refused("dispatch_audit: mm", name="b"), ours]}))
    flags = [f"--review={review}", f"--json={run}"]
    review.write_text(json.dumps({"b": {"class": "not_own_work", "note": "torch.mm"}}))
    assert command.main(flags) == 0
    said = capsys.readouterr().out
    assert "1  not_own_work: b" in said and "not yet read: a (reference_error)" in said
    wrongs: list[Any] = [{"c": {"class": "wrong"}}, {"b": {"class": "no such"}}, {"b": "text"}, []]
    for wrong in wrongs:
        review.write_text(json.dumps(wrong))
        assert command.main(flags) == 2
        assert "expected" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("again", "judged"),
    [("", ["h100/1/2"]), ("unmeasured, no_form", ["h100/1/1", "h100/1/2"]),
     ("correct,incorrect", ["h100/2/1", "h100/1/2"])],
)  # fmt: skip
def test_rows_of_earlier_runs_are_judged_again_where_asked(
    again: str, judged: list[str], cuda_l1_dir: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    older, newer, file = (tmp_path / name for name in ("older.json", "newer.json", "run.json"))
    slow = refused("clocks_agree: 1 ms", "unmeasured", name="h100/1/1")
    older.write_text(json.dumps({"rows": [slow, refused("", "unmeasured", name="h100/2/1")]}))
    ours = refused("", "reference_error", name="h100/1/2")
    # What the later file says counts: one of these was unmeasured once.
    newer.write_text(json.dumps({"rows": [row("h100/2/1"), ours]}))
    left: list[str] = []

    def none(plan: Any, published: list[Published], told: Any) -> list[Any]:
        left.extend(made.name for made in published)
        return []

    monkeypatch.setattr(command, "answers", none)
    flags = ["--suite=cuda_l1", f"--peer_dir={cuda_l1_dir}", "--target=cpu", "--only=h100/1;h100/2"]
    also = [f"--also={older},{newer}", f"--again={again}", f"--json={file}"]
    assert command.main([*flags, *also]) == 0
    assert sorted(left) == sorted(judged)
    kept = {made["name"]: made["status"] for made in json.loads(file.read_text())["rows"]}
    known = {"h100/1/1": "unmeasured", "h100/2/1": "correct"}
    assert {k: v for k, v in kept.items() if k in known} == {
        k: v for k, v in known.items() if k not in judged
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_command_judges_writes_and_goes_on(
    cuda_l1_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    flags = ["--suite=cuda_l1", f"--peer_dir={cuda_l1_dir}", "--target=cpu", "--workers=1",
             f"--store={tmp_path / 'store'}", "--memory_limit_gib=6"]  # fmt: skip
    assert command.main([*flags, "--num=1", f"--json={first}"]) == 0
    found = json.loads(first.read_text())
    (honest,) = found["rows"]
    assert honest["status"] in ("correct", "unmeasured"), honest["reason"]
    assert found["harness"] and found["environment"]["device"] and found["isolation"]
    assert "SOURCE" not in first.read_text()
    more = [*flags, "--only=h100/1;a100/1/6", f"--also={first}", f"--json={second}"]
    assert command.main(more) == 0
    rows = {made["name"]: made for made in json.loads(second.read_text())["rows"]}
    assert rows["h100/1/1"] == honest
    assert rows["h100/1/2"]["status"] == "incorrect" and rows["h100/1/2"]["claimed"] == 17
    assert rows["a100/1/6"]["status"] == "no_form"
    assert "decided, of 3:" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_submissions_are_decided_rightly(pygpubench_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    flags = ["--suite=pygpubench", f"--peer_dir={pygpubench_dir}", "--target=cpu", "--workers=1"]
    assert command.main([*flags, f"--json={file}"]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 6
    assert [(made["name"], rightly(made)) for made in rows if rightly(made) is not True] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_judge_that_is_killed_costs_the_kernel_it_was_at(tmp_path: Path) -> None:
    settings = factories.machine_settings(tmp_path, memory_limit_gib=6.0)
    plan = Plan(settings=settings, effort="reward", workers=1, seconds=300.0)
    starts = 0

    def kill_the_first(about: dict[str, Any]) -> None:
        nonlocal starts
        starts += 1
        assert about["harness"]
        children = psutil.Process().children()
        spawned = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
        if starts == 1:
            os.kill(spawned[0].pid, signal.SIGKILL)

    unreadable = Published(name="b", problem_code="")
    found = list(answers(plan, [Published(name="a"), unreadable], kill_the_first))
    assert [published.name for published, _ in found] == ["a", "b"]
    assert found[0][1]["error"] == "the judge's process ended with code -9"
    assert "no text" in found[1][1]["unreadable"] and starts == 2
