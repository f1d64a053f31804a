"""The comparison of the two efforts as a command: flags, going on, a tiny run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.efforts import __main__ as efforts
from benchmarks.efforts.entries import EXPLOIT, FAST, SLOW, WRONG
from benchmarks.efforts.run import Plan
from schemas.records import Isolation
from tests import factories
from tests.test_benchmark_effort_mix import ROWS
from verification.harness import harness_hash


def record(rows: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    return {
        "target": "cpu", "seed": 0, "harness": harness_hash(), "rows": rows, "skipped": [],
        "environment": {"device": "test device"},
    } | fields  # fmt: skip


def test_an_earlier_run_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    also, file = tmp_path / "a.json", tmp_path / "b.json"
    also.write_text(json.dumps(record(ROWS[:7], skipped=[{"id": "no", "reason": "does not fit"}])))
    plans: list[Plan] = []

    def run(plan: Plan, workers: int) -> Any:
        plans.append(plan)
        yield "pair", ROWS[7]
        assert len(json.loads(file.read_text())["rows"]) == 1, "written after every pair"
        yield "skipped", {"id": "x", "kind": FAST, "reason": "does not fit"}
        yield "error", {"id": "y", "kind": FAST, "reason": "OSError: no"}

    monkeypatch.setattr(efforts, "run", run)
    monkeypatch.setattr(efforts, "_about", lambda *_: {"environment": {"device": "test device"}})
    flags = ["--target=cpu", f"--also={also}", f"--json={file}"]
    assert efforts.main([*flags, "--num=8"]) == 0
    assert plans[0].done == {*(row["id"] for row in ROWS[:7]), "no"} and plans[0].pairs == 7
    found = json.loads(file.read_text())
    assert [row["id"] for row in found["rows"]] == ["slower"]
    assert [row["id"] for row in (*found["skipped"], *found["errors"])] == ["x", "y"]
    assert capsys.readouterr().out.startswith("7 of 8 pairs agree in tier: 87.5%")
    assert efforts.main(["--target=cpu", "--num=0", f"--also={also},{file}"]) == 0
    assert capsys.readouterr().out.startswith("7 of 8 pairs agree in tier: 87.5%")
    assert len(plans) == 1


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--num=-1"], "--num: expected 0 or more, got -1"),
        (["--workers=0"], "--workers: expected 1 or more, got 0"),
        (["--device_memory_gib=0"], "--device_memory_gib: expected more than 0"),
        (["--num=0"], "--num=0 prints a table of --also, which names no file"),
        (["--also=nowhere.json"], "nowhere.json is none: FileNotFoundError"),
        (["--json=nowhere/x.json"], "--json: expected a file in a folder that is there"),
        (["--also={also}", "--json={also}"], "is one of --also, name a new file"),
        (["--also={also},{also}"], "two of the files have the same pairs"),
        (["--also={also}", "--seed=1"], "was made with seed 0, here it is 1"),
        (["--also={old}"], "was made with harness old, here it is"),
        (["--also={torn}"], "torn.json is none: JSONDecodeError"),
        (["--target=cuda"], "nvidia-smi finds no GPU"),
    ],
)
def test_flags_are_checked_before_work(
    flags: list[str],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if why.startswith("nvidia-smi"):
        monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(efforts, "_run", lambda *_: pytest.fail("work was begun"))
    files = {name: tmp_path / f"{name}.json" for name in ("also", "old", "torn")}
    files["also"].write_text(json.dumps(record(ROWS[:1])))
    files["old"].write_text(json.dumps(record([], harness="old")))
    files["torn"].write_text('{"target": ')
    given = ["--target=cpu", *(flag.format(**files) for flag in flags)]
    assert efforts.main(given) == 2
    said = capsys.readouterr().err
    assert why in said and said.startswith("error: ") and said.count("\n") == 1


def test_partial_isolation_must_be_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Here:
        isolation = Isolation(
            network=False, user=True, limits=True, processes=True, filesystem=True, syscalls=True
        )
        environment = factories.environment()

        def close(self) -> None:
            pass

    monkeypatch.setattr(efforts, "Machine", lambda settings: Here())
    settings = factories.machine_settings(tmp_path)
    with pytest.raises(efforts.UsageError, match="missing are network; --partial_isolation"):
        efforts._about(settings, False, [])
    assert efforts._about(settings, True, [])["isolation"]["network"] is False
    with pytest.raises(efforts.UsageError, match="measured on H200, this is test device"):
        efforts._about(settings, True, [record([], environment={"device": "H200"})])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_command_judges_four_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    flags = [
        "--target=cpu",
        "--partial_isolation",
        f"--cache={tmp_path / 'cache'}",
        "--seconds=900",
    ]
    assert efforts.main([*flags, "--num=3", f"--json={one}"]) == 0
    assert efforts.main([*flags, "--num=4", "--workers=2", f"--also={one}", f"--json={two}"]) == 0
    first, second = (json.loads(file.read_text()) for file in (one, two))
    rows = first["rows"] + second["rows"]
    assert [row["kind"] for row in rows] == [FAST, WRONG, EXPLOIT, SLOW]
    assert len(second["rows"]) == 1 and not first["errors"] and not second["errors"]
    for row in rows:
        refused = row["kind"] in (WRONG, EXPLOIT)
        assert [row[effort]["tier"] == -1.0 for effort in ("reward", "publish")] == [refused] * 2
        if not refused:
            assert [row[effort]["processes"] for effort in ("reward", "publish")] == [1, 5]
        assert row["reward"]["seconds"] > 0 and row["publish"]["seconds"] > 0
    assert second["isolation"] and second["environment"]["device"]
    assert " of 4 pairs agree in tier: " in capsys.readouterr().out
