"""One rollout: a policy acts, the tools answer, the best verified solution is kept.

A bad rollout is data, not a crash: it ends with a stop reason, and its turns so far stay.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import replace
from pathlib import Path

from kernel_agent.policy import Action, Feedback, Policy, Task, Unsupported
from kernel_agent.prompts import prompt_of
from kernel_agent.tools import Toolbox
from schemas.codec import content_id, content_key, from_json, to_json
from schemas.records import (
    Admission,
    Problem,
    Solution,
    StopReason,
    Trajectory,
    TrajectoryKind,
    Turn,
    Verdict,
    VerdictStatus,
)
from verification.harness import harness_hash
from verification.judge import Judge
from verification.machine import Machine

MAX_TURNS = 200


def rollout(
    problem: Problem, admission: Admission, policy: Policy, machine: Machine
) -> dict[TrajectoryKind, str]:
    """Both trajectories of a problem, as their keys in the store under "trajectories".

    The optimized one starts from the solution of the reference one; without a correct reference
    it is attempted from scratch. What is finished is taken from the store.
    """
    with Judge(problem, admission, machine) as judge:
        first_key, first = _stored(judge, problem, policy, machine, TrajectoryKind.REFERENCE, None)
        key, _ = _stored(judge, problem, policy, machine, TrajectoryKind.OPTIMIZED, first)
    return {TrajectoryKind.REFERENCE: first_key, TrajectoryKind.OPTIMIZED: key}


def _stored(
    judge: Judge,
    problem: Problem,
    policy: Policy,
    machine: Machine,
    kind: TrajectoryKind,
    start: Trajectory | None,
) -> tuple[str, Trajectory]:
    key = content_key(
        harness_hash(), agent_hash(), problem.problem_id, kind, policy.name, machine.environment,
        start.trajectory_id if start else None, machine.settings.memory_limit_gib,
        machine.settings.device_memory_gib, machine.timeout_s,
    )  # fmt: skip
    found = machine.store.get("trajectories", key)
    if found is not None and found["stop_reason"] != StopReason.ENVIRONMENT_ERROR:
        return key, from_json(Trajectory, found)
    files = {f.path: f.text for f in start.solution.files} if start and start.solution else {}
    task = Task(
        problem=problem,
        device=machine.environment.device,
        kind=kind,
        files=files,
        start=start.verdict if start else None,
    )
    trajectory = play(policy, task, Toolbox(judge, files))
    machine.store.put("trajectories", key, to_json(trajectory))
    return key, trajectory


def play(policy: Policy, task: Task, tools: Toolbox) -> Trajectory:
    """Let the policy act until it is done, out of turns, or unable to go on."""
    turns: list[Turn] = []
    best: tuple[Solution, Verdict] | None = None
    stop, detail = StopReason.SUBMITTED, ""
    moves = policy.play(task)
    try:
        action = next(moves)
        while action.calls and len(turns) < MAX_TURNS:
            turn, verdict = _step(len(turns), action, tools, best)
            turns.append(turn)
            if verdict is not None and verdict.passed:
                best = _better(best, (tools.solution(), verdict))
            action = moves.send(Feedback(observations=turn.observations, verdict=verdict))
        if action.calls:
            stop, detail = StopReason.TURN_LIMIT, f"{MAX_TURNS} turns"
        else:
            turns.append(_last(len(turns), action))
    except StopIteration:
        pass
    except Unsupported as error:
        stop, detail = StopReason.UNSUPPORTED, str(error)
    if best is None and stop is StopReason.SUBMITTED:
        stop, detail = _without_solution(turns)
    return _trajectory(policy, task, tuple(turns), stop, detail, best)


def _step(
    index: int, action: Action, tools: Toolbox, best: tuple[Solution, Verdict] | None
) -> tuple[Turn, Verdict | None]:
    tools.verdict = None
    observations = tuple(tools.run(call) for call in action.calls)
    verdict = tools.verdict
    gain = None
    if best is not None and verdict is not None and verdict.solution and best[1].solution:
        gain = best[1].solution.median_ms / verdict.solution.median_ms
    turn = Turn(
        index=index,
        thought=action.thought,
        calls=action.calls,
        observations=observations,
        solution_id=tools.solution().solution_id if "model_new.py" in tools.files else None,
        verdict=verdict,
        layer=action.layer,
        gain=gain,
    )
    return turn, verdict


def _last(index: int, action: Action) -> Turn:
    """The closing words, without calls."""
    return Turn(
        index=index,
        thought=action.thought,
        calls=(),
        observations=(),
        solution_id=None,
        verdict=None,
        layer=None,
        gain=None,
    )


def _better(
    best: tuple[Solution, Verdict] | None, new: tuple[Solution, Verdict]
) -> tuple[Solution, Verdict]:
    """The faster one; a solution whose speed could not be measured gives way to one whose could."""
    if best is None or (new[1].correct and not best[1].correct):
        return new
    if not new[1].correct or best[1].solution is None or new[1].solution is None:
        return best
    return new if new[1].solution.median_ms < best[1].solution.median_ms else best


def _without_solution(turns: list[Turn]) -> tuple[StopReason, str]:
    """Whose fault it is that nothing correct came out, by the last verdict."""
    verdicts = [turn.verdict for turn in turns if turn.verdict is not None]
    if not verdicts:
        return StopReason.NO_CORRECT_SOLUTION, "no verdict"
    last = verdicts[-1]
    ours = last.status is VerdictStatus.REFERENCE_ERROR
    stop = StopReason.ENVIRONMENT_ERROR if ours else StopReason.NO_CORRECT_SOLUTION
    return stop, f"{last.status}: {last.reason}"[:500]


def _trajectory(
    policy: Policy,
    task: Task,
    turns: tuple[Turn, ...],
    stop: StopReason,
    detail: str,
    best: tuple[Solution, Verdict] | None,
) -> Trajectory:
    problem = task.problem
    system, prompt = prompt_of(problem, task.device)
    trajectory = Trajectory(
        trajectory_id="",
        problem_id=problem.problem_id,
        kind=task.kind,
        policy=policy.name,
        system=system,
        prompt=prompt,
        turns=turns,
        stop_reason=stop,
        detail=detail,
        solution=best[0] if best else None,
        verdict=best[1] if best else None,
    )
    return replace(trajectory, trajectory_id=content_id(content_key(trajectory)))


@functools.cache
def agent_hash() -> str:
    """The hash of every source file a rollout depends on, beside the harness."""
    root = Path(__file__).resolve().parent
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]
