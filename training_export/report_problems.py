"""The list of problems of the report: one line each that opens into code, kernels and timings."""

from __future__ import annotations

import html
from typing import Any

MAX_PROBLEMS = 200
"""So many problems are shown with their code; more would make a page too big to open."""

PROBLEM_COLUMNS = [
    "problem_id", "ops", "target", "precision", "headroom", "eager_ms", "compile_ms",
    "roofline_ms", "near_miss", "kernelbench_id", "kernelbench_similarity", "code",
]  # fmt: skip
ROLLOUT_COLUMNS = [
    "problem_id", "kind", "policy", "stop_reason", "num_turns", "status", "reward",
    "solution_median_ms", "eager_median_ms", "compile_median_ms", "speedup_eager",
    "speedup_eager_low", "speedup_eager_high", "speedup_compile", "speedup_compile_low",
    "speedup_compile_high", "max_error", "error_budget", "solution",
]  # fmt: skip

Row = dict[str, Any]


def text(value: Any) -> str:
    """The value as HTML text."""
    return html.escape(str(value))


def _number(value: float | None, unit: str = "", digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}g}{unit}"


def times(value: float | None) -> str:
    """A speedup, as in 1.50x."""
    return "-" if value is None else f"{value:.2f}x"


def problem_list(problems: list[Row], rollouts: list[Row], limit: int) -> str:
    """HTML of at most `limit` problems with their rollouts, fastest over torch.compile first."""
    best: dict[str, list[Row]] = {}
    for row in rollouts:
        best.setdefault(row["problem_id"], []).append(row)
    for rows in best.values():
        rows.sort(key=lambda row: row["kind"] != "optimized")
    pairs = [(problem, best.get(problem["problem_id"], [])) for problem in problems]
    pairs.sort(key=lambda pair: (_rank(pair[1]), pair[0]["problem_id"]))
    shown = _spread(pairs, limit)
    some = f" Shown are {len(shown):,} of {len(pairs):,}, evenly over that order."
    note = some if len(shown) < len(pairs) else ""
    head = (
        "<div class='grid head'><span>operators</span><span class='wide'>class</span>"
        "<span class='num wide'>headroom</span><span class='score'>reward</span>"
        "<span class='num'>eager</span><span class='num'>compile</span></div>"
    )
    return (
        f"<h2>Problems</h2><p class='soft'>By speedup over torch.compile.{note} "
        f"Open one for its code and kernels.</p>{head}{''.join(_problem(p, r) for p, r in shown)}"
    )


def _rank(rollouts: list[Row]) -> float:
    speedup = rollouts[0]["speedup_compile"] if rollouts else None
    return -speedup if speedup is not None else 0.0


def _spread(pairs: list[Any], limit: int) -> list[Any]:
    """At most `limit` of them, evenly over the order, so that the page shows no best-of."""
    if len(pairs) <= limit:
        return pairs
    return [pairs[i * len(pairs) // limit] for i in range(limit)]


def _problem(problem: Row, rollouts: list[Row]) -> str:
    top = rollouts[0] if rollouts else dict.fromkeys(ROLLOUT_COLUMNS)
    ops = ", ".join(op.removeprefix("torch.").removeprefix("nn.") for op in problem["ops"])
    summary = (
        f"<span class='ops'>{text(ops)}</span><span class='wide'>{problem['precision']}</span>"
        f"<span class='num wide'>{problem['headroom']:.2f}</span>"
        f"<span class='score'>{_pill(top['reward'])}</span>"
        f"<span class='num'>{times(top['speedup_eager'])}</span>"
        f"<span class='num'>{times(top['speedup_compile'])}</span>"
    )
    facts = {
        "problem": problem["problem_id"],
        "eager": _number(problem["eager_ms"], " ms"),
        "torch.compile": _number(problem["compile_ms"], " ms"),
        "roofline": _number(problem["roofline_ms"], " ms"),
        "nearest KernelBench": problem["kernelbench_id"] or "-",
        "similarity": f"{problem['kernelbench_similarity']:.2f}"
        + (" (near miss)" if problem["near_miss"] else ""),
    }
    inside = _facts(facts) + _code("model.py", problem["code"])
    solved = next((row for row in rollouts if row["solution"]), None)
    for row in rollouts:
        inside += f"<h3>{text(row['kind'])}</h3>{_facts(_outcome(row))}"
        if row is solved:
            inside += "".join(_code(f["path"], f["text"]) for f in row["solution"]["files"])
    return (
        f"<details><summary><div class='grid'>{summary}</div></summary>"
        f"<div class='inside'>{inside}</div></details>"
    )


def _outcome(row: Row) -> dict[str, str]:
    def over(name: str) -> str:
        if row[f"speedup_{name}"] is None:
            return "-"
        low, high = row[f"speedup_{name}_low"], row[f"speedup_{name}_high"]
        return f"{row[f'speedup_{name}']:.2f}x ({low:.2f} to {high:.2f})"

    return {
        "policy": row["policy"],
        "status": row["status"] or row["stop_reason"],
        "turns": str(row["num_turns"]),
        "solution": _number(row["solution_median_ms"], " ms"),
        "eager": _number(row["eager_median_ms"], " ms"),
        "torch.compile": _number(row["compile_median_ms"], " ms"),
        "over eager": over("eager"),
        "over torch.compile": over("compile"),
        "error / budget": f"{_number(row['max_error'])} / {_number(row['error_budget'])}",
    }


def _pill(reward: float | None) -> str:
    if reward is None:
        return "-"
    name = "x" if reward < 0 else f"{reward:.0f}"
    return f"<span class='r r{name}'>{reward:.0f}</span>"


def _facts(facts: dict[str, str]) -> str:
    cells = "".join(f"<div><dt>{text(k)}</dt><dd>{text(v)}</dd></div>" for k, v in facts.items())
    return f"<dl>{cells}</dl>"


def _code(name: str, source: str) -> str:
    return f"<h4>{text(name)}</h4><pre>{text(source.rstrip())}</pre>"
