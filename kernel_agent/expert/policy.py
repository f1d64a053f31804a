"""The expert as a policy: it plans from the problem's graph, and acts through the same tools as
a model.

    reference   one plain kernel per operator
    optimized   the fused plan, then its variants one by one, keeping the fastest

Its thoughts come from the plan (what the kernels do) and from the tools' own words (how fast
they are).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from kernel_agent import policy
from kernel_agent.expert import ir
from kernel_agent.expert.grouping import optimized_plan
from kernel_agent.expert.lowering import lower
from kernel_agent.expert.params import PLAIN, Params
from kernel_agent.expert.plan import Plan, reference_plan
from kernel_agent.expert.solution import solution_files
from kernel_agent.expert.variants import variants
from kernel_agent.policy import Action, Feedback, Task
from schemas.records import Layer, Problem, ToolCall, TrajectoryKind, Verdict

MAX_VARIANTS = 4
PATIENCE = 1
"""Changes in a row that may bring nothing before it stops."""
GAIN = 1.02
"""What counts as bringing something: time before / time after."""
NEAR_ROOFLINE = 0.9
OUT_OF_REACH = 0.5
"""Below this speedup over eager no other block size helps: on an H200 the best of 144 changes
brought 1.7x, and most nothing."""

Play = Generator[Action, Feedback, None]


class Expert:
    """Knows kernels, reads nothing but the problem's source, and no benchmark."""

    name = "expert"

    def __init__(self, trace: Callable[[Problem], dict[str, Any]]) -> None:
        self._trace = trace

    def play(self, task: Task) -> Play:
        traced = self._trace(task.problem)
        try:
            graph = lower(traced)
            reference = task.kind is TrajectoryKind.REFERENCE
            plan = reference_plan(graph) if reference else optimized_plan(graph)
            drafts = _drafts(plan, task)
        except ir.Unsupported as error:
            raise policy.Unsupported(str(error)) from error
        except (
            Exception
        ) as error:  # a gap in the planner costs the trajectory, and says where it is
            raise policy.Unsupported(f"planner: {type(error).__name__}: {error}") from error
        if reference:
            yield from _reference(plan, drafts[0])
        else:
            yield from _optimized(task, plan, drafts)


@dataclass(frozen=True, kw_only=True)
class Draft:
    """One way to print a plan: its files, and what should move compared with the one before."""

    params: Params
    files: dict[str, str]


def _drafts(plan: Plan, task: Task) -> list[Draft]:
    """The plan's variants as files, in the order of `variants`; identical ones once."""
    problem = task.problem
    chosen = [PLAIN]
    if task.kind is TrajectoryKind.OPTIMIZED:
        chosen = list(variants(plan, problem.target, problem.precision))
    drafts: list[Draft] = []
    for params in chosen:
        files = solution_files(problem.code, plan, problem.target, params)
        if all(files != draft.files for draft in drafts):
            drafts.append(Draft(params=params, files=files))
    return drafts[:MAX_VARIANTS]


def _reference(plan: Plan, draft: Draft) -> Play:
    thought = [
        "First a plain kernel per operator, so that there is something correct to measure.",
        *_notes(plan),
    ]
    calls = (*_writes({}, draft.files), _call("compile"))
    built = yield Action(thought="\n".join(thought), calls=calls)
    if _build_failed(built):
        yield Action(thought="It does not build; I have no other way to write it.", calls=())
        return
    seen = yield _look("Built. Is it right, and where does it stand?")
    yield Action(thought=_closing(seen), calls=())


def _optimized(task: Task, plan: Plan, drafts: Sequence[Draft]) -> Play:
    workspace, best_files = dict(task.files), dict(task.files)
    best, idle = task.start, 0
    for index, draft in enumerate(drafts):
        if draft.files == workspace:
            continue
        why = f"Next, {draft.params.name}: {draft.params.why}"
        layer = Layer.FINE_TUNING if index else Layer.ALGORITHM
        calls = (*_writes(workspace, draft.files), _call("compile"))
        workspace = draft.files
        thought = why if index else _opening(plan)
        built = yield Action(thought=thought, calls=calls, layer=layer)
        if _build_failed(built):
            continue
        seen = yield _look("Built. Right, and faster?", layer)
        gain = _gain(best, seen.verdict)
        if gain is not None and gain > 1.0:
            best, best_files = seen.verdict, draft.files
        idle = 0 if gain is not None and gain >= GAIN else idle + 1
        if idle >= PATIENCE or _near_roofline(best) or _out_of_reach(best):
            break
    if best is not None and workspace != best_files:
        thought = "The last change brought nothing; back to the fastest version."
        yield Action(thought=thought, calls=(*_writes(workspace, best_files), _call("compile")))
        seen = yield _look("Is it the one I measured?")
        yield Action(thought=_closing(seen), calls=())
        return
    yield Action(thought="Done: the fastest version is in place.", calls=())


def _opening(plan: Plan) -> str:
    lines = [
        "Fewer passes over memory first: operators that walk the same elements go into one kernel."
    ]
    return "\n".join([*lines, *_notes(plan)])


def _notes(plan: Plan) -> list[str]:
    return [f"- {note}" for note in plan.describe()]


def _look(thought: str, layer: Layer | None = None) -> Action:
    return Action(thought=thought, calls=(_call("verify"), _call("profile")), layer=layer)


def _closing(seen: Feedback) -> str:
    """The last words quote the profile's own line about our time."""
    text = "\n".join(seen.observations)
    if "PASS" not in text:
        return "It is not right, and I have no other way to write it."
    line = re.search(r"^yours .*$", text, re.MULTILINE)
    return f"Correct. The profile says: {' '.join(line.group().split())}." if line else "Correct."


def _gain(best: Verdict | None, new: Verdict | None) -> float | None:
    """Time before / time after; infinite for the first correct one, None when not correct."""
    if new is None or not new.correct or new.solution is None:
        return None
    if best is None or best.solution is None:
        return float("inf")
    return best.solution.median_ms / new.solution.median_ms


def _out_of_reach(verdict: Verdict | None) -> bool:
    if verdict is None or verdict.speedup_eager is None:
        return False
    return verdict.speedup_eager.point < OUT_OF_REACH


def _near_roofline(verdict: Verdict | None) -> bool:
    if verdict is None or verdict.solution is None or verdict.roofline_ms is None:
        return False
    return verdict.roofline_ms / verdict.solution.median_ms >= NEAR_ROOFLINE


def _build_failed(feedback: Feedback) -> bool:
    return feedback.observations[-1].startswith("build failed")


def _writes(before: dict[str, str], files: dict[str, str]) -> tuple[ToolCall, ...]:
    return tuple(
        _call("write", path=path, content=text)
        for path, text in sorted(files.items())
        if before.get(path) != text
    )


def _call(name: str, **arguments: str) -> ToolCall:
    return ToolCall(name=name, arguments=json.dumps(arguments))
