"""The stages as plain functions: they join the rooms with the store, and know nothing of Beam.

    compose      index                  -> item with problem_id, and the Problem in the store
    admit        item                   -> item with the store key of its Admission
    deduplicate  every admitted item    -> items with their Neighbour
    rollout      item                   -> item with the store keys of its trajectories
    rows         item                   -> item with the files its rows go to
    write_shard  a file and its items   -> what was written
    finish       everything small       -> card, report, run.json (pipelines/finish.py)

Each takes the settings first and yields what it keeps, and a `Rejection` for what it does not.
Items travel between workers, so they are plain dicts and small; big records stay in the store.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from dedup.decontaminate import decontaminate
from dedup.deduplicate import deduplicate as deduplicate_rows
from dedup.kernelbench import load_index
from dedup.rows import Row
from dedup.signature import signature
from kernel_agent.policies import policy_named
from kernel_agent.prompts import prompt_of
from kernel_agent.rollout import rollout as agent_rollout
from kernel_agent.tools import TOOLS
from operator_templates import compose as composer
from operator_templates.catalogue.registry import all_templates
from pipelines.dead_letters import internal_error
from pipelines.finish import finish as finish
from pipelines.items import (
    Item,
    admission_of,
    ids_of,
    keep_admission,
    keep_problem,
    problem_of,
    trajectory_of,
)
from pipelines.options import RunConfig
from pipelines.spans import span
from pipelines.transforms import Place, num_shards
from pipelines.workshop import local_path, machine
from runtime.sandbox import ParentGone
from schemas.codec import from_json, to_json
from schemas.records import (
    Neighbour,
    Problem,
    Rejection,
    RejectStage,
    StopReason,
    Target,
    TrajectoryKind,
)
from training_export import rows as export_rows
from training_export import shards
from training_export.rules import ExportSettings, SftRule
from verification.admission import admit as screen

T = TypeVar("T")


def compose(config: RunConfig, index: int) -> Iterator[Item | Rejection]:
    """The problem at an index: the same for the same seed and target, wherever it is composed."""
    try:
        with _span(config, "compose"):
            problem = composer.compose(config.seed, index, Target(config.target))
    except composer.ComposeError as error:
        yield Rejection(
            problem_id="",
            stage=RejectStage.COMPOSE,
            reason="no_composition",
            detail=error.reason,
            kind=None,
            index=index,
        )
        return
    key = keep_problem(config, problem)
    yield {"index": index, "problem_id": problem.problem_id, "candidate": key}


def admit(config: RunConfig, item: Item) -> Iterator[Item | Rejection]:
    """Screen a problem on this worker's device."""
    problem = problem_of(config, item)
    with _span(config, "admit"):
        admission = _despite_a_killed_parent(
            lambda: screen(problem, machine(config), signature, _declared(problem))
        )
    if admission.reason is None:
        yield item | {"admission": keep_admission(config, admission)}
    else:
        yield Rejection(
            stage=RejectStage.ADMIT,
            reason=admission.reason,
            detail=admission.detail,
            kind=None,
            **ids_of(item),
        )


def deduplicate(config: RunConfig, items: Iterable[Item]) -> Iterator[Item | Rejection]:
    """Decontaminate and deduplicate the whole run. What it decides does not depend on arrival."""
    ordered = sorted(items, key=lambda item: item["index"])
    with _span(config, "dedup"):
        found = [Row.of(admission_of(config, item), item["index"]) for item in ordered]
        matched, contaminated = decontaminate(found, load_index())
        neighbours, duplicates = deduplicate_rows(matched)
    yield from contaminated
    yield from duplicates
    # Of equal texts the one with the smallest index is kept: the first one found.
    first: dict[str, Item] = {}
    for item in ordered:
        first.setdefault(item["problem_id"], item)
    for neighbour in neighbours:
        yield first[neighbour.problem_id] | {"neighbour": to_json(neighbour)}


def rollout(config: RunConfig, item: Item) -> Iterator[Item | Rejection]:
    """Roll out both trajectories of a problem. One that is lost does not cost the problem."""
    ids = ids_of(item)
    try:
        with _span(config, "rollout"):
            problem, admission = problem_of(config, item), admission_of(config, item)
            policy = policy_named(config.policy, machine(config))
            keys = _despite_a_killed_parent(
                lambda: agent_rollout(problem, admission, policy, machine(config))
            )
    except Exception as error:
        for kind in TrajectoryKind:
            yield internal_error(error, stage=RejectStage.ROLLOUT, kind=kind, **ids)
        yield item | {"trajectories": {}}
        return
    kept = {}
    for kind, key in keys.items():
        trajectory = trajectory_of(config, key)
        if trajectory.stop_reason is StopReason.UNSUPPORTED:
            yield Rejection(
                stage=RejectStage.ROLLOUT,
                reason=trajectory.stop_reason,
                detail=trajectory.detail,
                kind=kind,
                **ids,
            )
        else:
            kept[str(kind)] = key
    yield item | {"trajectories": kept}


def rows(config: RunConfig, item: Item) -> Iterator[Item | Rejection]:
    """Decide which files a problem's rows go to; a config that refuses one yields why."""
    placed, lost = _placed(config, item)
    yield from lost
    files = {_place(config, name, split, row) for name, split, row in placed}
    yield item | {"files": sorted(files)}


def write_shard(
    config: RunConfig, shard: tuple[Place, Iterable[Item | dict[str, Any] | None]]
) -> Iterator[dict[str, Any]]:
    """Write one file from the records of its items (for `rejected`: from the rows themselves)."""
    place, items = shard
    name, split, number = place
    with _span(config, "export"):
        if name == "rejected":
            found = [row for row in items if row is not None]
        else:
            found = [
                row
                for item in items
                if item is not None
                for its_name, its_split, row in _placed(config, item)[0]
                if _place(config, its_name, its_split, row) == place
            ]
        file = shards.shard_file(name, split, number, num_shards(config)[name])
        count, size = shards.write_shard(f"{config.output}/{file}", name, found)
    yield {"file": file, "config": name, "split": split, "rows": count, "size_bytes": size}


def _placed(config: RunConfig, item: Item) -> tuple[list[export_rows.Placed], list[Rejection]]:
    """Every row of a problem, and what configs refused. A bug in building rows is a refusal too."""
    problem, admission = problem_of(config, item), admission_of(config, item)
    neighbour = from_json(Neighbour, item["neighbour"])
    settings = ExportSettings(
        tools=json.dumps(TOOLS),
        sft_rule=SftRule(config.sft),
        keep_near_misses=config.near_misses == "keep",
    )
    placed: list[export_rows.Placed] = []
    lost: list[Rejection] = []

    def collect(make: Any, configs: tuple[str, ...], kind: TrajectoryKind | None) -> None:
        try:
            found = make()
        except Exception as error:
            for name in configs:
                ids = ids_of(item) | {"kind": kind, "config": name}
                lost.append(internal_error(error, stage=RejectStage.EXPORT, **ids))
            return
        placed.extend(row for row in found if row[0] != "rejected")
        lost.extend(from_json(Rejection, row[2]) for row in found if row[0] == "rejected")

    system, user = prompt_of(problem, admission.environment.device)
    prompt = export_rows.AgentPrompt(system=system, user=user)
    collect(
        lambda: export_rows.rows_of_problem(problem, admission, neighbour, prompt, settings),
        ("problems", "ppo_warmup", "rl"),
        None,
    )
    for kind, key in item["trajectories"].items():
        trajectory = trajectory_of(config, key)
        collect(
            lambda t=trajectory: export_rows.rows_of_trajectory(
                problem, admission, neighbour, t, settings
            ),
            ("trajectories", "sft", "critic"),
            TrajectoryKind(kind),
        )
    return placed, lost


def _place(config: RunConfig, name: str, split: str, row: dict[str, Any]) -> Place:
    number = shards.shard_of(shards.row_id(name, row), num_shards(config)[name])
    return name, split, number


def _declared(problem: Problem) -> list[str]:
    """The calls that the problem's operators leave in a trace."""
    calls = {template.name: template.canonical for template in all_templates().values()}
    return [call for op in problem.ops for call in calls[op]]


def _despite_a_killed_parent(measure: Callable[[], T]) -> T:
    """Measure, and again from a new warm parent if the shared one was killed meanwhile: one problem
    that kills it must not cost those that are under way beside it."""
    try:
        return measure()
    except ParentGone:
        return measure()


def _span(config: RunConfig, stage: str) -> Any:
    return span(local_path(config, "spans.log"), stage)
