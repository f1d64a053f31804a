"""The ATen graph of a problem, traced in a sandboxed worker: planning runs no foreign code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kernel_agent.policy import Unsupported
from runtime.sandbox import WorkerError
from schemas.codec import content_id, content_key
from schemas.records import Problem
from verification.machine import Machine


def trace(problem: Problem, machine: Machine) -> dict[str, Any]:
    """The traced graph as JSON (see `expert.aten`). Raises Unsupported when tracing fails."""
    key = content_key("aten", _tracer_hash(), problem.problem_id, machine.environment.torch)
    found = machine.store.get("graphs", key)
    if found is None:
        with machine.building():
            worker = machine.spawn("kernel_agent.tracing:handlers", "reference", code=problem.code)
            try:
                found = worker.call("trace", machine.timeout_s)
            except WorkerError as error:  # also one that hung or was killed
                raise Unsupported(f"tracing failed: {error.kind}: {error}"[:500]) from error
            finally:
                worker.close()
        machine.store.put("graphs", key, found)
    return found


@functools.cache
def _tracer_hash() -> str:
    return content_id((Path(__file__).parent / "expert" / "aten.py").read_text())


def handlers(config: dict[str, Any], isolation: dict[str, bool]) -> dict[str, Callable[..., Any]]:
    """The entry point of a tracing worker."""
    from kernel_agent.expert.aten import trace_aten
    from runtime.problem_code import load_module

    return {"trace": lambda: trace_aten(load_module(config["code"]))}
