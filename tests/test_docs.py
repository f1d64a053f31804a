"""What the documents say is so: folders, counts and figures are looked up where they come from."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from operator_templates.catalogue.registry import all_templates, families

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
LOG = (ROOT / "docs" / "log.md").read_text()


def test_the_tree_in_the_readme_is_the_tree() -> None:
    block = README.split("## The tree")[1].split("```")[1]
    named = {line.split("/")[0] for line in block.strip().splitlines()}
    there = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] not in "._"}
    assert named <= there
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages <= named


def test_the_readme_counts_the_catalogue() -> None:
    assert f"{len(all_templates())} operators in {len(families())} families" in README


@pytest.mark.parametrize(
    "name",
    ["README.md", "CONTRIBUTING.md", "docs/log.md", "docs/dataflow.md", "docs/verifier.md"],
)
def test_nothing_is_left_to_fill_in(name: str) -> None:
    text = (ROOT / name).read_text()
    assert not re.findall(r"\b[A-Z]+_(?:TABLE|TIME|SHORT|OPS6K|TEST)\b|\bTODO\b|\bXXX\b", text)


def test_every_module_in_the_readme_runs() -> None:
    for module in re.findall(r"python -m ([a-z_.0-9]+)", README):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def test_paths_in_documents_exist() -> None:
    for name in ("README.md", "CONTRIBUTING.md", "docs/log.md"):
        text = (ROOT / name).read_text()
        for path in re.findall(r"`((?:tests|docs|runs|verification|pipelines)/[\w./-]+)`", text):
            base = ROOT / "docs" if path.startswith("runs/") else ROOT
            assert (base / path).exists(), f"{name}: {path}"


def test_the_log_quotes_the_cpu_run() -> None:
    run = json.loads((ROOT / "docs/runs/2026-11-30-cpu-default.json").read_text())
    assert f"{run['candidates']} candidates = {run['kept']} kept" in LOG
    for kind in ("reference", "optimized"):
        found = run["results"][kind]
        assert f"{found['correct']} of {found['problems']} correct" in LOG
        eager, compile = found["geomean_speedup_eager"], found["geomean_speedup_compile"]
        assert f"geomean {eager:.2f}x eager, {compile:.2f}x torch.compile" in LOG


def test_the_log_quotes_the_gpu_screening() -> None:
    run = json.loads((ROOT / "docs/runs/2026-11-30-h200-screening.json").read_text())
    admitted = [row for row in run["problems"] if row["reason"] is None]
    roomy = sum(row["headroom"] >= 1.2 for row in admitted)
    assert f"{len(run['problems'])} candidates screened: {len(admitted)} admitted" in LOG
    assert f"Of the {len(admitted)}, {roomy} have headroom >= 1.2" in LOG
    assert f"copy {run['rates_per_s']['copy'] / 1e12:.2f} TB/s" in LOG


def test_the_log_quotes_the_gpu_run() -> None:
    found = raw("main-job")
    run = found["run"]
    lost = run["candidates"] - run["kept"]
    assert f"{run['candidates']} candidates = {run['kept']} kept + {lost} rejected" in LOG
    assert run["settings"]["attempts"] == 1
    assert f"uninterrupted run: {run['seconds']['total']:.0f} s from its first line" in LOG
    for kind, result in run["results"].items():
        rows = [row for row in found["trajectories"] if row["kind"] == kind]
        right = sum(row["status"] == "correct" for row in rows)
        assert right == result["correct"]
        eager, compiled = (
            statistics.geometric_mean([row[f"speedup_{side}"][1] for row in rows])
            for side in ("eager", "compile")
        )
        faster = [result[f"faster_than_{side}"] for side in ("eager", "compile")]
        assert (
            f"{right} of {result['problems']} correct; {faster[0]} more than 5 % faster than "
            f"eager, {faster[1]} than torch.compile too; "
            f"geomean {eager:.2f}x eager, {compiled:.2f}x torch.compile"
        ) in LOG
    measured = found["measured_verdicts"]
    assert measured.keys() == {"correct"}
    assert f"| verdicts | {measured['correct']} measured, all correct" in LOG


def test_the_log_quotes_what_bounds_the_gpu_run() -> None:
    found = raw("pipeline")
    rates = (found["candidates_per_minute"], found["kept_per_minute"])
    assert f"| problems a minute | {rates[0]:.1f} candidates, {rates[1]:.1f} kept |" in LOG
    seconds = ", ".join(f"{stage} {value:.0f}" for stage, value in found["stage_s"].items())
    assert f"| seconds | {seconds};" in LOG
    shares = [f"{100 * found[f'{name}_share']:.0f} %" for name in ("lease", "demand")]
    assert f"{shares[0]} of the time; leased or waited for {shares[1]}" in LOG
    spent = found["worker_seconds"]["rollout"]
    assert f"{spent['wait to open the device']['seconds']:,.0f} waited at the lock" in LOG
    assert f"{spent['nvcc']['seconds']:.0f} were nvcc" in LOG


def test_the_log_quotes_what_opening_a_device_costs() -> None:
    found = raw("opening")
    phases = found["phases"]
    quiet, made, dying = (phases[n] for n in ("quiet", "contexts are made", "processes die"))
    assert quiet["device_ms"]["p50"] == made["device_ms"]["p50"] == dying["device_ms"]["p50"]
    points = (quiet["device_ms"]["p99"] * 1e3, dying["device_ms"]["p99"] * 1e3)
    assert f"from {points[0]:.1f} to {points[1]:.1f} µs" in LOG
    assert f"{made['timings']:,} took {made['wall_ms']['max']:.0f} ms" in LOG
    assert f"{max(found['seconds_to_open_together']['12']):.1f} s for twelve" in LOG
    samples = [row["samples_ms"]["solution"] for row in raw("main-job")["trajectories"]]
    far = sum(one > 2 * statistics.median(own) for own in samples for one in own)
    assert found["main_job"]["opened_under_the_lease"]["samples"]["solution"] == {
        "samples": sum(map(len, samples)),
        "beyond_twice_the_median": far,
    }
    beside, under = (
        found["main_job"][name]["samples"]["solution"]
        for name in ("opened_beside_timings", "opened_under_the_lease")
    )
    assert (
        f"{beside['beyond_twice_the_median']} of\n{beside['samples']:,} are beyond twice their "
        f"median, against {under['beyond_twice_the_median']} of {under['samples']:,};"
    ) in LOG


def test_the_log_quotes_the_exploits_on_a_gpu() -> None:
    items = raw("exploits")["items"]
    count = {
        kind: [item for item in items if item["kind"] == kind]
        for kind in ("exploit", "twin", "control")
    }
    refused = [i for i in count["exploit"] if i["ok"] or i["status"] != "correct"]
    assert f"{len(refused)} of {len(count['exploit'])} refused" in LOG
    assert f"{sum(i['ok'] for i in count['exploit'])} by a guard named for them" in LOG
    accepted = sum(i["ok"] for i in count["twin"])
    assert f"{accepted} of {len(count['twin'])} accepted" in LOG
    assert f"{sum(i['ok'] for i in count['control'])} of {len(count['control'])}: with its" in LOG


def test_the_log_quotes_a_baseline_against_itself() -> None:
    found = raw("aa")
    ratios = [row["point"] for row in found["same"]]
    faster = sum(row["low"] > found["threshold"] for row in found["same"])
    width = statistics.median(row["high"] - row["low"] for row in found["same"])
    assert f"{len(ratios)} measurements of eager against eager" in LOG
    assert f"called faster {faster} times, ratios {min(ratios):.4f} to {max(ratios):.4f}" in LOG
    assert f"{width:.4f} wide in the median" in LOG


def raw(name: str) -> dict[str, Any]:
    return dict(json.loads((ROOT / f"docs/runs/2026-11-30-h200-{name}.json").read_text()))
