"""The ATen graph of a problem, traced in a sandboxed worker: planning runs no foreign code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernel_agent.policy import Unsupported
from runtime.sandbox import WorkerError
from schemas.codec import content_key
from schemas.records import Problem
from verification.machine import Machine


def trace(problem: Problem, machine: Machine) -> dict[str, Any]:
    """The traced graph as JSON (see `expert.aten`). Raises Unsupported when tracing fails."""
    key = content_key("aten", problem.problem_id, machine.environment.torch)
    found = machine.store.get("graphs", key)
    if found is None:
        with machine.building():
            worker = machine.spawn("kernel_agent.tracing:handlers", "reference", code=problem.code)
            try:
                found = worker.call("trace", machine.timeout_s)
            except WorkerError as error:
                raise Unsupported(f"tracing failed: {error}"[:500]) from error
            finally:
                worker.close()
        machine.store.put("graphs", key, found)
    return found


def handlers(config: dict[str, Any], isolation: dict[str, bool]) -> dict[str, Callable[..., Any]]:
    """The entry point of a tracing worker."""
    from kernel_agent.expert.aten import trace_aten
    from runtime.problem_code import load_module

    return {"trace": lambda: trace_aten(load_module(config["code"]))}
