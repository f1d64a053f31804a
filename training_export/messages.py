"""A trajectory as a chat, and what makes one unfit for training.

    system, user, then per turn: assistant (thought + tool calls), tool (one observation per call)

Tool call ids are nine letters and digits and unique in the chat: the strictest chat templates
ask for that.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from schemas.records import ToolCall, Trajectory, Turn

MAX_REPEATS = 3
"""A rollout that makes the same calls and sees the same answers this often in a row is looping."""

Message = dict[str, Any]


def chat(trajectory: Trajectory) -> list[Message]:
    """Messages of a rollout. Raises ValueError when `malformed` finds something."""
    if (problem := malformed(trajectory)) is not None:
        raise ValueError(f"trajectory {trajectory.trajectory_id}: {problem}")
    messages = [_message("system", trajectory.system), _message("user", trajectory.prompt)]
    for turn in trajectory.turns:
        ids = [f"t{turn.index:04d}c{i:03d}" for i in range(len(turn.calls))]
        calls = [_tool_call(key, call) for key, call in zip(ids, turn.calls, strict=True)]
        messages.append(_message("assistant", turn.thought, tool_calls=calls or None))
        for key, call, seen in zip(ids, turn.calls, turn.observations, strict=True):
            messages.append(_message("tool", seen, tool_call_id=key, name=call.name))
    return messages


def _message(role: str, content: str, **rest: Any) -> Message:
    return {
        "role": role,
        "content": content,
        "tool_calls": rest.get("tool_calls"),
        "tool_call_id": rest.get("tool_call_id"),
        "name": rest.get("name"),
    }


def _tool_call(key: str, call: ToolCall) -> dict[str, Any]:
    return {
        "id": key,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def malformed(trajectory: Trajectory) -> str | None:
    """Why a rollout cannot be told as a chat, or None. Such a row would be wrong, not just bad."""
    if not trajectory.turns:
        return "no turns"
    if not trajectory.system or not trajectory.prompt:
        return "no system prompt or no prompt"
    if (order := [turn.index for turn in trajectory.turns]) != list(range(len(order))):
        return f"turn indices are {order[:5]}, not 0, 1, 2"
    for turn in trajectory.turns:
        if len(turn.calls) != len(turn.observations):
            return (
                f"turn {turn.index}: {len(turn.calls)} calls, {len(turn.observations)} observations"
            )
        if not turn.calls and not turn.thought:
            return f"turn {turn.index}: neither a thought nor a call"
    return None


def schema_violation(trajectory: Trajectory, tools: str) -> str | None:
    """The first call that is not one of `tools` or does not fit its parameters, or None.

    `tools` is a JSON list of function definitions as chat templates take them. Checked are the
    name, that arguments are a JSON object, required keys and unknown keys; not the types of the
    values, which the tool itself judges.
    """
    known = {tool["function"]["name"]: tool["function"] for tool in json.loads(tools)}
    for turn in trajectory.turns:
        for call in turn.calls:
            if (problem := _call_violation(call, known)) is not None:
                return f"turn {turn.index}: {problem}"
    return None


def _call_violation(call: ToolCall, known: dict[str, Any]) -> str | None:
    if call.name not in known:
        return f"no tool {call.name!r}"
    try:
        arguments = json.loads(call.arguments)
    except ValueError:
        return f"{call.name}: arguments are not JSON"
    if not isinstance(arguments, dict):
        return f"{call.name}: arguments are not an object"
    parameters = known[call.name].get("parameters", {})
    if missing := sorted(set(parameters.get("required", [])) - set(arguments)):
        return f"{call.name}: missing {missing}"
    if unknown := sorted(set(arguments) - set(parameters.get("properties", {}))):
        return f"{call.name}: unknown {unknown}"
    return None


def looping(trajectory: Trajectory, max_repeats: int = MAX_REPEATS) -> str | None:
    """Where a rollout does the same with the same outcome `max_repeats` times in a row, or None.

    Cycles of two or more different turns are not found.
    """
    run = 1
    for before, after in pairwise(trajectory.turns):
        run = run + 1 if _step(before) == _step(after) else 1
        if run >= max_repeats:
            return f"turns {after.index - run + 1} to {after.index} are the same"
    return None


def _step(turn: Turn) -> tuple[tuple[ToolCall, ...], tuple[str, ...]]:
    return turn.calls, turn.observations
