"""What travels between the stages, and the records in the store that it names.

An item is a plain dict and small: big records stay in the store.
"""

from __future__ import annotations

from typing import Any

from pipelines.options import RunConfig
from pipelines.workshop import store
from schemas.codec import content_key, from_json, to_json
from schemas.records import Admission, Problem, Trajectory

Item = dict[str, Any]
"""index, problem_id, candidate (a store key), and then what each stage adds."""


def keep_problem(config: RunConfig, problem: Problem) -> str:
    """Its key."""
    return _keep(config, "candidates", content_key("candidate", problem), problem)


def keep_admission(config: RunConfig, admission: Admission) -> str:
    """Its key."""
    return _keep(config, "admitted", content_key("admitted", admission), admission)


def _keep(config: RunConfig, kind: str, key: str, record: Problem | Admission) -> str:
    if store(config).get(kind, key) is None:
        store(config).put(kind, key, to_json(record))
    return key


def problem_of(config: RunConfig, item: Item) -> Problem:
    return from_json(Problem, store(config).get("candidates", item["candidate"]))


def admission_of(config: RunConfig, item: Item) -> Admission:
    return from_json(Admission, store(config).get("admitted", item["admission"]))


def trajectory_of(config: RunConfig, key: str) -> Trajectory:
    return from_json(Trajectory, store(config).get("trajectories", key))


def ids_of(item: Item) -> dict[str, Any]:
    """What names an item in a rejection."""
    return {"problem_id": item["problem_id"], "index": item["index"]}
