"""The rollout loop with scripted policies and a scripted judge: what it keeps, and how it ends."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any, cast

import pytest

from kernel_agent.policy import Action, Feedback, Task, Unsupported
from kernel_agent.prompts import prompt_of
from kernel_agent.rollout import MAX_TURNS, play
from kernel_agent.tools import MAX_OBSERVATION, Toolbox, clip
from schemas.records import (
    Precision,
    Solution,
    StopReason,
    Target,
    ToolCall,
    Trajectory,
    TrajectoryKind,
    Verdict,
    VerdictStatus,
)
from tests import factories


def call(name: str, **arguments: str) -> ToolCall:
    return ToolCall(name=name, arguments=json.dumps(arguments))


def attempt(text: str) -> Action:
    write = call("write", path="model_new.py", content=text)
    return Action(thought=text, calls=(write, call("verify")))


class FakeJudge:
    """Verdicts by the text of model_new.py."""

    def __init__(self, **verdicts: Verdict) -> None:
        self.verdicts = verdicts

    def verify(self, solution: Solution) -> Verdict:
        return self.verdicts[solution.text("model_new.py")]


class Scripted:
    name = "scripted"

    def __init__(self, *actions: Action) -> None:
        self.actions = actions
        self.seen: list[Feedback] = []

    def play(self, task: Task) -> Generator[Action, Feedback, None]:
        for action in self.actions:
            self.seen.append((yield action))


def timed(milliseconds: float) -> Verdict:
    return factories.verdict(solution=factories.measurement(milliseconds))


def rollout(policy: Any, judge: FakeJudge) -> Trajectory:
    task = Task(
        problem=factories.problem(),
        device="a device",
        kind=TrajectoryKind.OPTIMIZED,
        files={},
        start=None,
    )
    tools = Toolbox(cast(Any, judge))
    return play(policy, task, tools)


def test_the_best_of_a_trajectory_is_kept_not_the_last() -> None:
    judge = FakeJudge(slow=timed(2.0), fast=timed(1.0), slower=timed(3.0))
    done = rollout(Scripted(*map(attempt, ("slow", "fast", "slower"))), judge)
    assert done.stop_reason is StopReason.SUBMITTED
    assert done.solution is not None
    assert done.solution.text("model_new.py") == "fast"
    assert [turn.gain for turn in done.turns] == [None, 2.0, pytest.approx(1 / 3)]
    assert [turn.index for turn in done.turns] == [0, 1, 2]


def test_measured_beats_unmeasured() -> None:
    unmeasured = factories.verdict(VerdictStatus.UNMEASURED)
    judge = FakeJudge(first=unmeasured, second=timed(5.0), third=unmeasured)
    done = rollout(Scripted(*map(attempt, ("first", "second", "third"))), judge)
    assert done.solution is not None
    assert done.solution.text("model_new.py") == "second"


def test_failures_are_data() -> None:
    judge = FakeJudge(wrong=factories.verdict(VerdictStatus.INCORRECT))
    done = rollout(Scripted(attempt("wrong")), judge)
    assert done.stop_reason is StopReason.NO_CORRECT_SOLUTION
    assert done.solution is None
    assert len(done.turns) == 1
    assert done.turns[0].observations[1].startswith("FAIL (incorrect)")


def test_our_own_failure_is_told_apart() -> None:
    judge = FakeJudge(x=factories.verdict(VerdictStatus.REFERENCE_ERROR))
    assert rollout(Scripted(attempt("x")), judge).stop_reason is StopReason.ENVIRONMENT_ERROR


def test_a_policy_may_refuse() -> None:
    class Refuses:
        name = "refuses"

        def play(self, task: Task) -> Generator[Action, Feedback, None]:
            raise Unsupported("aten.sort")
            yield

    done = rollout(Refuses(), FakeJudge())
    assert (done.stop_reason, done.detail) == (StopReason.UNSUPPORTED, "aten.sort")
    assert done.turns == ()


def test_turns_run_out() -> None:
    policy = Scripted(*[Action(thought="again", calls=(call("nothing"),))] * (MAX_TURNS + 5))
    done = rollout(policy, FakeJudge())
    assert done.stop_reason is StopReason.TURN_LIMIT
    assert len(done.turns) == MAX_TURNS


@pytest.mark.parametrize(
    ("bad", "answer"),
    [
        (call("sing"), "unknown tool 'sing'"),
        (ToolCall(name="write", arguments="{not json"), "not JSON"),
        (ToolCall(name="write", arguments="[1]"), "must be a JSON object"),
        (call("write", path="model_new.py"), "missing a required argument: 'content'"),
        (call("verify", hard="yes"), "unexpected keyword argument 'hard'"),
        (ToolCall(name="write", arguments='{"path": 1, "content": "x"}'), "must be strings"),
        (call("write", path="model.py", content="x"), "read-only"),
        (call("write", path="../escape.py", content="x"), "outside the workspace"),
        (call("verify"), "no model_new.py yet"),
    ],
)
def test_what_is_wrong_with_a_call_is_its_answer(bad: ToolCall, answer: str) -> None:
    policy = Scripted(Action(thought="", calls=(bad,)))
    observation = rollout(policy, FakeJudge()).turns[0].observations[0]
    assert observation.startswith("error: ")
    assert answer in observation


def test_our_own_bugs_are_not_answers() -> None:
    class Broken:
        def verify(self, solution: Solution) -> Verdict:
            raise TypeError("a bug of ours")

    with pytest.raises(TypeError, match="a bug of ours"):
        rollout(Scripted(attempt("x")), cast(Any, Broken()))


def test_long_observations_lose_their_middle() -> None:
    text = clip("a" * MAX_OBSERVATION + "b" * MAX_OBSERVATION)
    assert text.startswith("aaa")
    assert text.endswith("bbb")
    assert f"{MAX_OBSERVATION} characters cut" in text
    assert clip("short") == "short"


@pytest.mark.parametrize("target", Target)
@pytest.mark.parametrize("precision", Precision)
def test_prompts_fit_target_and_precision(target: Target, precision: Precision) -> None:
    problem = factories.problem(target=target, precision=precision)
    system, user = prompt_of(problem, "a device")
    assert ("nvcc" in system) == (target is Target.CUDA)
    assert str(precision) in system
    assert "{" not in system.replace('extern "C"', "").split("```")[0]
    assert problem.code.strip() in user
