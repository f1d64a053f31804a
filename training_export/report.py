"""One self-contained HTML page about an export: funnel, speedups, problems with their kernels."""

from __future__ import annotations

import statistics
from typing import Any

from training_export import plots, read
from training_export.report_problems import (
    MAX_PROBLEMS,
    PROBLEM_COLUMNS,
    ROLLOUT_COLUMNS,
    problem_list,
    text,
    times,
)
from training_export.report_style import CSS

Row = dict[str, Any]


def report(root: str, run: Row, max_problems: int = MAX_PROBLEMS) -> str:
    """HTML of the export at `root`. Raises ValueError when shards and run record disagree."""
    read.check_rows(read.sizes(root), run)
    problems = read.rows(root, "problems", PROBLEM_COLUMNS)
    rollouts = read.rows(root, "trajectories", ROLLOUT_COLUMNS)
    parts = [
        _head(run),
        _tiles(run, rollouts),
        _funnel(run),
        _histograms(rollouts),
        problem_list(problems, rollouts, max_problems),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><title>ops6k run</title>'
        f"<style>{CSS}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _head(run: Row) -> str:
    device = run["device"]
    return (
        f"<h1>ops6k run</h1><p class='soft'>{text(device['device'])}, PyTorch "
        f"{text(device['torch'])}, started {text(run['started'])}, commit "
        f"{text((run['commit'] or 'unknown')[:12])}</p>"
        f"<p class='soft'><code>{text(' '.join(run['command']))}</code></p>"
    )


def _tiles(run: Row, rollouts: list[Row]) -> str:
    tuned = [row for row in rollouts if row["kind"] == "optimized"]
    right = [row for row in tuned if row["status"] == "correct"]
    tiles = [
        (f"{run['kept']:,}", f"problems of {run['candidates']:,} candidates"),
        (f"{run['trajectories']:,}", f"trajectories of {run['rollouts']:,} rollouts"),
        (f"{len(right):,} / {len(tuned):,}", "optimized and correct"),
        (
            times(read.geomean(row["speedup_eager"] for row in right)),
            "geomean over eager, optimized",
        ),
        (
            times(read.geomean(row["speedup_compile"] for row in right)),
            "over torch.compile, optimized",
        ),
    ]
    cells = "".join(f"<div class='tile'><b>{v}</b>{text(name)}</div>" for v, name in tiles)
    return f"<div class='tiles'>{cells}</div>"


def _funnel(run: Row) -> str:
    rows = [_bar(stage["stage"], stage["kept"], stage["rejected"]) for stage in run["stages"]]
    configs = [
        _bar(config, sum(part["rows"].values()), part["refused"])
        for config, part in run["configs"].items()
        if config not in ("problems", "rejected")
    ]
    return (
        f"<h2>Funnel</h2><p class='soft'>{run['candidates']:,} candidates = {run['kept']:,} kept "
        f"+ {run['candidates'] - run['kept']:,} rejected. The last stage counts rollouts.</p>"
        f"<div>{''.join(rows)}</div><h2>What each config took</h2><div>{''.join(configs)}</div>"
    )


def _bar(name: str, left: int, reasons: dict[str, int]) -> str:
    whole = left + sum(reasons.values())
    why = "".join(f"<span>{text(reason)} {count:,}</span>" for reason, count in reasons.items())
    return (
        f"<div class='stage'><div>{text(name)}</div>"
        f"<div class='bar'><i style='width:{100 * left / whole if whole else 0:.1f}%'></i></div>"
        f"<div class='num'>{left:,} of {whole:,}</div>"
        + (f"<div class='why'>{why}</div>" if why else "")
        + "</div>"
    )


def _histograms(rollouts: list[Row]) -> str:
    right = [r for r in rollouts if r["status"] == "correct" and r["kind"] == "optimized"]
    if not right:
        return "<h2>Speedups</h2><p>No correct optimized solution.</p>"
    series = {name: [row[f"speedup_{name}"] for row in right] for name in ("eager", "compile")}
    low = min(0.5, *(min(values) for values in series.values()))
    high = max(2.0, *(max(values) for values in series.values()))
    drawn = "".join(
        f"<p>{_caption(name, values)}</p>"
        + plots.log_histogram(
            values,
            _caption(name, values),
            name,
            low,
            high,
        )
        for name, values in series.items()
    )
    return (
        "<h2>Speedups of optimized solutions</h2><p class='soft'>Baseline time / solution time, "
        f"{len(right):,} correct solutions, log axis.</p>{drawn}"
    )


def _caption(name: str, values: list[float]) -> str:
    baseline = "torch.compile" if name == "compile" else name
    return f"over {baseline}: median {statistics.median(values):.2f}x"
