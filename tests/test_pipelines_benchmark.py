"""The arithmetic of the pipeline benchmark, on figures one can check in one's head."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import pipeline


def record(**changes: Any) -> dict[str, Any]:
    base = {
        "command": ["python"],
        "commit": None,
        "versions": {},
        "device": {"device": "a CPU", "num_threads": 2},
        "settings": {"target": "cpu", "attempts": 1},
        "candidates": 30,
        "kept": 15,
        "trajectories": 28,
        "seconds": {"compose": 2.0, "admit": 60.0, "rollout": 40.0, "total": 120.0},
        "lease_share": 0.25,
    }
    return base | changes


def test_rates_and_bound() -> None:
    figures = pipeline.figures_of(record())
    assert figures["candidates_per_minute"] == 15
    assert figures["kept_per_minute"] == 7.5
    assert figures["bound_by"].startswith("admit, work beside the timings: 50%")
    assert any("admit s" in line and "50%" in line for line in pipeline.table(figures))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"lease_share": 0.7}, "the device: 70%"),
        ({"seconds": {"admit": 20.0, "total": 120.0}}, "start-up: 83%"),
        ({"seconds": {"total": 120.0}, "lease_share": None}, "not known"),
    ],
)
def test_what_bounds_a_run(changes: dict[str, Any], expected: str) -> None:
    assert pipeline.figures_of(record(**changes))["bound_by"].startswith(expected)


def test_a_resumed_run_is_no_benchmark() -> None:
    with pytest.raises(ValueError, match="started 2 times"):
        pipeline.figures_of(record(settings={"target": "cpu", "attempts": 2}))


def test_a_finished_run_is_read_and_written_as_json(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(record()))
    file = tmp_path / "figures.json"
    (tmp_path / ".store").mkdir()
    lines = ("10.0\t2.0\t3.0\ta", "11.0\t4.0\t0.0\ta", "30.0\t4.0\t0.0\ta", "9.0\t4.0\t2.0\tb")
    (tmp_path / ".store" / "lease.log").write_text("\n".join(lines) + "\n")
    assert pipeline.main([f"--run={tmp_path}", f"--json={file}"]) == 0
    figures = json.loads(file.read_text())
    assert figures["kept"] == 15
    # Device a from 7 to 15 and from 30 to 34, device b from 7 to 13: 9 s a device, of 120.
    assert figures["demand_share"] == 0.075
