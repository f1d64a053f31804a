"""The body of the dataset card. Every number is from the shards or the run record."""

from __future__ import annotations

import shlex
from collections import Counter
from typing import Any

from schemas.arrow import SCHEMAS, describe, splits_of
from training_export import read
from training_export.rewards import MIN_SPEEDUP, THRESHOLD
from training_export.rules import SPEED_HEADROOM

Sizes = dict[str, dict[str, dict[str, int]]]

_USED_FOR = {
    "problems": "the problems: generate, evaluate, filter",
    "trajectories": "every rollout with its verdicts and timings",
    "ppo_warmup": "single-turn RL: one prompt, one answer with all files",
    "sft": "supervised fine-tuning on good rollouts",
    "critic": "value pretraining, failures included",
    "rl": "agentic RL: the agent's prompt",
    "rejected": "what was left out, where and why",
}


def body(root: str, run: dict[str, Any], sizes: Sizes, name: str) -> str:
    """Markdown below the YAML header; `name` is what the snippets load."""
    parts = [
        _what(run),
        _load(name, sizes),
        _contents(sizes),
        _how(run),
        _funnel(run),
        _fields(),
        _rewards(run),
        _speedups(root),
        _decontamination(root),
        _hardware(root, run),
        _limits(),
        _licence(),
    ]
    return "\n\n".join(parts) + "\n"


def table(header: list[str], rows: list[list[Any]]) -> str:
    """A Markdown table; columns of numbers are aligned right. Cells may hold bars and newlines."""
    cells = [[_cell(value) for value in row] for row in rows]
    numeric = [
        bool(rows) and all(isinstance(row[i], int | float) or row[i] is None for row in rows)
        for i in range(len(header))
    ]
    rule = ["---:" if number else "---" for number in numeric]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *cells))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.2f}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def _what(run: dict[str, Any]) -> str:
    return f"""# ops6k

Training data for agents that write fast GPU kernels: PyTorch operator problems in KernelBench form,
rollouts that write and tune kernels for them, and the rows of each training stage. The problems are
synthetic. The times, errors and speedups are measured: each on the device its row names, with an
interval. This release holds {run["kept"]:,} problems and {run["trajectories"]:,} trajectories. It
follows the stages of CUDA Agent (arXiv 2602.24286); the columns `ops`, `data_source` and `code`
read as in CUDA-Agent-Ops-6K, where `ops` is `json.dumps` of our list."""


def _load(name: str, sizes: Sizes) -> str:
    return f"""## Load

```python
from datasets import load_dataset

problems = load_dataset("{name}", "problems", split="train")      # code, times, headroom
sft = load_dataset("{name}", "sft", split="train")                # messages with tool calls, tools
critic = load_dataset("{name}", "critic", split="train")          # messages, rewards, returns
warmup = load_dataset("{name}", "ppo_warmup", split="train")      # verl columns, single turn
rl = load_dataset("{name}", "rl", split="train")                  # verl columns, agent prompt
```

In `messages`, Arrow gives every message every key; drop those that are None before a chat template
sees them:

```python
chat = [{{k: v for k, v in m.items() if v is not None}} for m in row["messages"]]
text = tokenizer.apply_chat_template(chat, tools=json.loads(row["tools"]), tokenize=False)
```{_empty_note(sizes)}"""


def _empty_note(sizes: Sizes) -> str:
    empty = [f"`{c}` {s}" for c, splits in sizes.items() for s in splits if not splits[s]["rows"]]
    if not empty:
        return ""
    return (
        f"\n\nWithout rows in this release, and so not loadable by name: {', '.join(empty)}. "
        "Their files are there, with the schema."
    )


def _contents(sizes: Sizes) -> str:
    rows: list[list[Any]] = [
        [
            f"`{config}`",
            splits["train"]["rows"],
            splits["validation"]["rows"] if "validation" in splits_of(config) else None,
            sum(total["bytes"] for total in splits.values()),
            _USED_FOR[config],
        ]
        for config, splits in sizes.items()
    ]
    return "## Contents\n\n" + table(["config", "train", "validation", "bytes", "for"], rows)


def _how(run: dict[str, Any]) -> str:
    seconds = ", ".join(f"{stage} {value:,.0f} s" for stage, value in run["seconds"].items())
    lease = run["lease_share"]
    held = "" if lease is None else f" The device was being measured on {lease:.0%} of the time."
    settings = "\n".join(f"- `{key}`: `{value}`" for key, value in run["settings"].items())
    return f"""## How it was made

Problems are composed from operator templates by seed, screened by running them, freed of what
resembles KernelBench or another problem, and handed to a policy that writes a plain correct
solution (`reference`) and tunes it (`optimized`). A verifier that never imports the solution's
code checks and times every solution in a separate process.

```
{shlex.join(run["command"])}
```

Commit `{run["commit"] or "unknown"}`, seed {run["seed"]}, started {run["started"]}. Wall time:
{seconds or "not recorded"}.{held}

{settings}"""


def _funnel(run: dict[str, Any]) -> str:
    rows: list[list[Any]] = [
        [stage["stage"], stage["entered"], stage["kept"], _reasons(stage["rejected"])]
        for stage in run["stages"]
    ]
    configs: list[list[Any]] = [
        [f"`{config}`", sum(part["rows"].values()), _reasons(part["refused"])]
        for config, part in run["configs"].items()
        if config != "rejected"
    ]
    lost = run["candidates"] - run["kept"]
    return f"""## Funnel

{run["candidates"]:,} candidates = {run["kept"]:,} kept + {lost:,} rejected. Up to `dedup` the table
counts problems, at `rollout` it counts rollouts. Each loss is a row of `rejected`.

{table(["stage", "entered", "kept", "rejected"], rows)}

What each config took, and what it left:

{table(["config", "rows", "left out"], configs)}"""


def _reasons(reasons: dict[str, int]) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in reasons.items()) or "-"


def _fields() -> str:
    parts = ["## Fields\n\nUnits are in the names. Null means not measured."]
    for config, schema in SCHEMAS.items():
        rows: list[list[Any]] = [
            [f"`{field.name}`", "yes" if field.nullable else "", describe(field)]
            for field in schema
        ]
        fields = table(["column", "may be null", "holds"], rows)
        parts.append(f"<details><summary>{config}</summary>\n\n{fields}\n\n</details>")
    return "\n\n".join(parts)


def _rewards(run: dict[str, Any]) -> str:
    rule = run["settings"].get("sft_rule", "not recorded")
    return f"""## Rewards and filters

-1 incorrect; 1 correct; 2 also faster than eager; 3 also faster than default-mode torch.compile.
Faster means (t0 - t) / t0 > {THRESHOLD:.0%}, and counts when the lower end of the 95 % interval of
the speedup clears {MIN_SPEEDUP:.4f}. A rollout has the reward of its best solution. `critic` puts
it on the last assistant message, zero before, and sums it into returns with gamma 1.

- `sft` follows the rule `{rule}`, for `reference` and `optimized` rollouts alike, by the verdict on
  the best solution; it also leaves out calls that no tool takes, and loops. So it holds few
  `reference` rollouts: what is correct and slow is in `trajectories` and `critic`.
- The speed split (`speed_split`) is headroom >= {SPEED_HEADROOM}: where torch.compile already runs
  at the roofline, no honest solution is 5 % faster. `rl` holds the speed split only.
- Training configs leave out near misses of KernelBench; `problems` keeps them, labelled."""


def _speedups(root: str) -> str:
    columns = ["kind", "reward", "status", "speedup_eager", "speedup_compile"]
    found = read.rows(root, "trajectories", columns)
    rows: list[list[Any]] = []
    for kind in sorted({row["kind"] for row in found}):
        mine = [row for row in found if row["kind"] == kind]
        right = [row for row in mine if row["status"] == "correct"]
        by_reward = Counter(row["reward"] for row in mine)
        rows.append(
            [
                kind,
                len(mine),
                len(right),
                *(by_reward[reward] for reward in (-1.0, 1.0, 2.0, 3.0)),
                read.geomean(row["speedup_eager"] for row in right),
                read.geomean(row["speedup_compile"] for row in right),
            ]
        )
    header = ["kind", "rollouts", "correct", "reward -1", "1", "2", "3", "x eager", "x compile"]
    return (
        "## Speedups\n\nGeometric means over correct solutions, baseline time / solution time.\n\n"
        + table(header, rows)
    )


def _decontamination(root: str) -> str:
    found = read.rows(root, "problems", ["kernelbench_similarity", "near_miss"])
    nearest = max((row["kernelbench_similarity"] for row in found), default=None)
    near = sum(row["near_miss"] for row in found)
    return f"""## Decontamination

Two problems are the same when they compute the same thing, whatever their text: every problem is
traced to its operator graph on the `meta` device, and 1- to 3-grams of operators are compared by
exact Jaccard similarity, with KernelBench and within the set. Nearest kept problem to KernelBench:
{_cell(nearest)}; {near:,} near misses are labelled. The split follows the dedup cluster, so no
operator signature is on both sides. Not caught: the same function computed by other operators."""


def _hardware(root: str, run: dict[str, Any]) -> str:
    columns = ["device", "driver", "toolkit", "compiler", "torch", "python"]
    found = Counter(tuple(row.values()) for row in read.rows(root, "problems", columns))
    rows: list[list[Any]] = [[*key, count] for key, count in sorted(found.items(), key=str)]
    packages = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    return (
        f"## Hardware and versions\n\n{table([*columns, 'problems'], rows)}\n\n"
        f"The run used {packages}."
    )


def _limits() -> str:
    return """## Known limits

- Synthetic problems of one to five operators with fixed shapes; no backward passes.
- Times hold for the device of their row. They do not carry over to another.
- A correct verdict is a test on sampled inputs, not a proof.
- Loops of two or more alternating steps are not detected by the `sft` filter."""


def _licence() -> str:
    return """## Licence

Data CC-BY-4.0. KernelBench is used only to be compared with; none of it is in here.

## Citation

```bibtex
@misc{ops6k,
  title = {ops6k: open training data for agents that write fast GPU kernels},
  year = {2026},
  note = {Dataset}
}
@article{cudaagent,
  title = {CUDA Agent},
  journal = {arXiv preprint arXiv:2602.24286},
  year = {2026}
}
```"""
