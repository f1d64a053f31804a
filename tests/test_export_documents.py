"""Card, report and run record say what the shards hold, or refuse to be written."""

from __future__ import annotations

import copy
import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pandas
import pytest
import yaml

from schemas.arrow import SCHEMAS, splits_of
from tests.export_flow import Flow, make_flow, record
from training_export import card, card_text, report, shards
from training_export.run_record import git_commit, versions


def test_card_numbers_are_those_of_the_data(
    exported: tuple[Path, Flow, dict[str, Any]],
) -> None:
    root, _, _ = exported
    text = (root / "README.md").read_text()
    header = yaml.safe_load(text.split("---")[1])
    infos = {info["config_name"]: info for info in header["dataset_info"]}
    assert [c["config_name"] for c in header["configs"] if c.get("default")] == ["problems"]
    assert header["license"] == "cc-by-4.0"
    for config in SCHEMAS:
        frames = {
            split: [pandas.read_parquet(p) for p in sorted(root.glob(f"data/{config}/{split}-*"))]
            for split in splits_of(config)
        }
        counts = {split: sum(map(len, parts)) for split, parts in frames.items()}
        listed = {s["name"]: s["num_examples"] for s in infos[config]["splits"]}
        assert listed == counts
        on_disk = sum(p.stat().st_size for p in root.glob(f"data/{config}/*"))
        assert infos[config]["download_size"] == on_disk
        assert f"| `{config}` | {counts['train']} |" in text
        assert f"{on_disk:,} |" in text
        assert [f["name"] for f in infos[config]["features"]] == SCHEMAS[config].names
    assert "6 candidates = 4 kept + 2 rejected" in text
    assert "| optimized | 4 | 4 | 0 | 0 | 0 | 4 | 4.00 | 2.00 |" in text
    assert "| reference | 3 | 3 | 0 | 3 | 0 | 0 | 1.00 | 0.50 |" in text
    assert "| `sft` | 4 | not_faster_than_eager 3 |" in text
    assert str(root) not in text, "no path of the machine that made it"


def test_card_refuses_a_run_record_of_other_data(
    exported: tuple[Path, Flow, dict[str, Any]],
) -> None:
    root, _, run = exported
    wrong = copy.deepcopy(run)
    wrong["configs"]["sft"]["rows"]["train"] += 1
    for make in (card.card, report.report):
        with pytest.raises(ValueError, match=r"sft: run\.json says"):
            make(str(root), wrong)


def test_report_is_one_file_that_shows_the_kernels(
    exported: tuple[Path, Flow, dict[str, Any]],
) -> None:
    root, _, run = exported
    page = (root / "report.html").read_text()
    assert page.count("<details>") == 4
    assert "extern &quot;C&quot; void relu_0" in page
    assert "prefers-color-scheme: dark" in page
    assert "http://" not in page and "https://" not in page and "<script" not in page
    assert "constant_output 1" in page and "not_faster_than_eager 3" in page
    short = report.report(str(root), run, max_problems=2)
    assert short.count("<details>") == 2
    assert "Shown are 2 of 4" in short


def test_markdown_cells_cannot_break_the_table() -> None:
    text = card_text.table(["a", "b"], [["x|y\nz", 1234], ["", 5]])
    assert text.splitlines()[1:] == ["| --- | ---: |", "| x\\|y z | 1,234 |", "|  | 5 |"]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"candidates": 7}, r"7 candidates, 4 kept, 2 rejected; \+1 problems"),
        ({"kept": 3}, "problems: 4 rows"),
        ({"rollouts": 9}, "9 rollouts, 7 trajectories, 1 lost"),
        ({"trajectories": 8}, "trajectories: 7 rows"),
    ],
)
def test_runs_that_do_not_add_up_are_refused(
    change: dict[str, Any], match: str, tmp_path: Path
) -> None:
    flow = make_flow()
    written = shards.write_rows(str(tmp_path), flow.placed, {})
    with pytest.raises(ValueError, match=match):
        record(flow, written, **change)


def test_a_rollout_never_loses_the_problem(tmp_path: Path) -> None:
    flow = make_flow()
    written = shards.write_rows(str(tmp_path), flow.placed, {})
    losses = Counter(flow.losses)
    losses["rollout", "unsupported", None] = losses.pop(("rollout", "unsupported", "reference"))
    with pytest.raises(ValueError, match="needs a kind"):
        record(flow, written, losses=losses)


def test_stages_count_down_from_candidates_to_kept(
    exported: tuple[Path, Flow, dict[str, Any]],
) -> None:
    stages = {stage["stage"]: stage for stage in exported[2]["stages"]}
    assert [(s["entered"], s["kept"]) for s in stages.values()] == [
        (6, 6), (6, 5), (5, 5), (5, 4), (8, 7),
    ]  # fmt: skip
    assert stages["admit"]["rejected"] == {"constant_output": 1}
    assert json.loads((exported[0] / "run.json").read_text()) == exported[2]


def test_commit_and_versions(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert git_commit(str(tmp_path)) is None
    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "first")
    head = git("rev-parse", "HEAD")
    assert git_commit(str(tmp_path)) == head
    (tmp_path / "a").write_text("2")
    assert git_commit(str(tmp_path)) == f"{head}-dirty"
    assert {"python", "torch", "pyarrow"} <= versions().keys()
