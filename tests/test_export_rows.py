"""Which rows records become, where refused ones go, and that nothing unfit gets through."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from schemas.arrow import SCHEMAS
from schemas.codec import to_json
from schemas.records import (
    AdmitReason,
    SourceFile,
    StopReason,
    Target,
    ToolCall,
    Trajectory,
    TrajectoryKind,
    VerdictStatus,
)
from tests import factories
from training_export import messages, single_turn
from training_export.rows import (
    AgentPrompt,
    rows_of_problem,
    rows_of_rejection,
    rows_of_trajectory,
)
from training_export.rules import ExportSettings, SftRule
from training_export.validate import validate

SETTINGS = ExportSettings(tools=factories.TOOLS)
PROMPT = AgentPrompt(system="You are an agent.", user="Beat model.py.")
WON = factories.verdict(eager=2.0, compile=1.0)


def of_problem(kept: factories.Kept, settings: ExportSettings = SETTINGS) -> dict[str, Any]:
    placed = rows_of_problem(kept.problem, kept.admission, kept.neighbour, PROMPT, settings)
    return by_config(placed, kept.neighbour.split)


def of_trajectory(
    trajectory: Trajectory,
    kept: factories.Kept | None = None,
    settings: ExportSettings = SETTINGS,
) -> dict[str, Any]:
    kept = kept or factories.kept()
    parts = (kept.problem, kept.admission, kept.neighbour)
    return by_config(rows_of_trajectory(*parts, trajectory, settings), kept.neighbour.split)


def by_config(placed: list[tuple[str, str, dict[str, Any]]], split: str) -> dict[str, Any]:
    """{config: row}, refused ones as {config: reason}; checks the splits on the way."""
    out: dict[str, Any] = {}
    for config, where, row in placed:
        if config == "rejected":
            assert where == "train"
            assert row["stage"] == "export"
            config, _, out_value = row["reason"].partition(".")
        else:
            assert where == split
            out_value = row
        assert config not in out, "a config takes a row once, or refuses it once"
        out[config] = out_value
    return out


def test_a_kept_problem_goes_to_three_configs() -> None:
    kept = factories.kept(3, split="validation")
    found = of_problem(kept)
    assert found.keys() == {"problems", "ppo_warmup", "rl"}
    row = found["problems"]
    assert list(row) == SCHEMAS["problems"].names
    assert row["problem_id"] == kept.problem.problem_id
    assert json.dumps(row["ops"]) == '["torch.mul", "torch.relu"]'
    assert (row["headroom"], row["speed_split"], row["device"]) == (2.0, True, "test device")
    rl = found["rl"]
    assert rl["prompt"] == [
        {"role": "system", "content": "You are an agent."},
        {"role": "user", "content": "Beat model.py."},
    ]
    assert rl["reward_model"] == {"style": "rule", "ground_truth": kept.problem.code}
    assert rl["extra_info"]["split"] == "validation"
    assert rl["extra_info"]["headroom"] == 2.0
    assert kept.problem.code.rstrip() in found["ppo_warmup"]["prompt"][1]["content"]


@pytest.mark.parametrize(("headroom", "taken"), [(1.2, True), (1.1999, False)])
def test_rl_holds_the_speed_split_only(headroom: float, taken: bool) -> None:
    found = of_problem(factories.kept(headroom=headroom))
    assert found["problems"]["speed_split"] is taken
    assert (found["rl"] != "no_headroom") is taken
    assert isinstance(found["ppo_warmup"], dict)


def test_near_misses_stay_in_problems_only_unless_asked_for() -> None:
    kept = factories.kept(near_miss=True)
    rollout = factories.trajectory(kept, WON)
    found = of_problem(kept) | of_trajectory(rollout, kept)
    assert {c: v for c, v in found.items() if v == "near_miss"}.keys() == {
        "ppo_warmup", "rl", "sft", "critic",
    }  # fmt: skip
    assert found["problems"]["near_miss"] is True
    keep = ExportSettings(tools=factories.TOOLS, keep_near_misses=True)
    found = of_problem(kept, keep) | of_trajectory(rollout, kept, keep)
    assert "near_miss" not in [v for v in found.values() if isinstance(v, str)]


def test_records_of_different_problems_are_refused() -> None:
    one, two = factories.kept(1), factories.kept(2)
    with pytest.raises(ValueError, match="different problems"):
        rows_of_problem(one.problem, two.admission, one.neighbour, PROMPT, SETTINGS)
    with pytest.raises(ValueError, match="expected"):
        of_trajectory(factories.trajectory(two), one)
    refused = factories.refused(one.problem.problem_id, AdmitReason.TOO_FAST)
    with pytest.raises(ValueError, match="too_fast"):
        rows_of_problem(one.problem, refused, one.neighbour, PROMPT, SETTINGS)


def test_a_won_trajectory() -> None:
    found = of_trajectory(factories.trajectory(best=WON))
    assert found.keys() == {"trajectories", "sft", "critic"}
    for config, row in found.items():
        assert list(row) == SCHEMAS[config].names
    row = found["trajectories"]
    assert (row["status"], row["reward"], row["num_turns"]) == ("correct", 2.0, 2)
    assert (row["solution_median_ms"], row["eager_median_ms"]) == (1.0, 2.0)
    assert row["speedup_eager_low"] < row["speedup_eager"] < row["speedup_eager_high"]
    assert [turn["reward"] for turn in row["turns"]] == [-1.0, 2.0]
    assert [f["path"] for f in row["solution"]["files"]] == ["kernels/relu.cpp", "model_new.py"]
    parts = ("network", "user", "limits", "processes", "filesystem", "syscalls")
    assert row["isolation"] == dict.fromkeys(parts, True)
    assert (row["labels"], row["processes"]) == (["not_bitwise_repeatable"], 5)
    assert (row["knocked_out"], row["own_share"], row["sm_clock_mhz"]) == (2, 1.0, 1980.0)
    assert found["critic"]["rewards"] == [0.0, 2.0]
    assert found["critic"]["returns"] == [2.0, 2.0]
    assistant = [m for m in found["critic"]["messages"] if m["role"] == "assistant"]
    assert len(assistant) == len(found["critic"]["rewards"])


def test_a_failed_trajectory_teaches_the_critic_only() -> None:
    found = of_trajectory(factories.trajectory())
    assert found["sft"] == "not_correct"
    assert found["critic"]["reward"] == -1.0
    row = found["trajectories"]
    assert (row["status"], row["solution"], row["speedup_eager"]) == ("incorrect", None, None)
    assert (row["max_error"], row["error_budget"]) == (1.0, 1e-6)


@pytest.mark.parametrize("rule", SftRule)
def test_what_could_not_be_timed_is_no_example_of_speed(rule: SftRule) -> None:
    """Every check passed, so it is a correct rollout everywhere but in sft."""
    best = factories.verdict(VerdictStatus.UNMEASURED)
    settings = ExportSettings(tools=factories.TOOLS, sft_rule=rule)
    found = of_trajectory(factories.trajectory(best=best), settings=settings)
    assert found["sft"] == "unmeasured"
    assert found["critic"]["reward"] == 1.0
    assert found["trajectories"]["speedup_eager"] is None
    assert found["trajectories"]["solution"] is not None


def test_the_error_shown_is_of_the_check_nearest_to_its_budget() -> None:
    checks = (
        factories.check(error=5e-7, budget=1e-6),
        factories.check(error=9e-4, budget=1.0),
        factories.check(error=None, budget=None),
    )
    row = of_trajectory(factories.trajectory(best=factories.verdict(checks=checks)))["trajectories"]
    assert (row["max_error"], row["error_budget"], row["num_checks"]) == (5e-7, 1e-6, 3)


@pytest.mark.parametrize(
    ("rule", "eager", "compile", "expected"),
    [
        (SftRule.CORRECT, 0.5, 0.5, None),
        (SftRule.FASTER_THAN_EAGER, 2.0, 0.5, None),
        (SftRule.FASTER_THAN_EAGER, 1.06, 2.0, "not_faster_than_eager"),  # low end is 1.04
        (SftRule.FASTER_THAN_COMPILE, 0.5, 2.0, None),
        (SftRule.FASTER_THAN_COMPILE, 2.0, 1.0, "not_faster_than_compile"),
    ],
)
@pytest.mark.parametrize("kind", TrajectoryKind)
def test_sft_rules(
    rule: SftRule, eager: float, compile: float, expected: str | None, kind: TrajectoryKind
) -> None:
    best = factories.verdict(eager=eager, compile=compile)
    settings = ExportSettings(tools=factories.TOOLS, sft_rule=rule)
    found = of_trajectory(factories.trajectory(best=best, kind=kind), settings=settings)["sft"]
    assert found == expected if expected else found["kind"] == kind


def same(count: int) -> tuple[Any, ...]:
    step = factories.turn(0)
    return tuple(
        factories.turn(i, calls=step.calls, observations=step.observations) for i in range(count)
    )


def with_call(name: str, arguments: str) -> tuple[Any, ...]:
    return (factories.turn(0, calls=(ToolCall(name=name, arguments=arguments),)),)


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        (same(2), None),
        (same(3), "looping"),
        ((*same(2), factories.turn(2), factories.turn(3)), None),
        (with_call("browse", "{}"), "schema_violation"),
        (with_call("write", "not json"), "schema_violation"),
        (with_call("write", "[]"), "schema_violation"),
        (with_call("write", "{}"), "schema_violation"),
        (with_call("write", '{"path": "x", "mode": "w"}'), "schema_violation"),
        (with_call("write", '{"path": "x"}'), None),
    ],
)
def test_loops_and_wrong_calls_are_not_imitated(turns: Any, reason: str | None) -> None:
    found = of_trajectory(factories.trajectory(best=WON, turns=turns))
    assert (found["sft"] if reason else None) == reason
    assert isinstance(found["critic"], dict), "the critic learns from them"


@pytest.mark.parametrize(
    "fields",
    [
        {"turns": ()},
        {"turns": (factories.turn(1),)},
        {"turns": (factories.turn(0, observations=()),)},
        {"turns": (factories.turn(0, thought="", calls=(), observations=()),)},
        {"prompt": ""},
    ],
)
def test_malformed_rollouts_are_refused_everywhere(fields: dict[str, Any]) -> None:
    bad = factories.trajectory(best=WON, **fields)
    assert set(of_trajectory(bad).values()) == {"malformed"}
    with pytest.raises(ValueError, match=bad.trajectory_id):
        messages.chat(bad)


def test_no_reward_no_critic_row() -> None:
    broken = factories.trajectory(stop_reason=StopReason.ENVIRONMENT_ERROR)
    found = of_trajectory(broken)
    assert found["trajectories"]["reward"] is None
    assert found["critic"] == found["sft"] == "environment_error"
    ours = factories.turn(0, verdict=factories.verdict(VerdictStatus.REFERENCE_ERROR))
    assert of_trajectory(factories.trajectory(turns=(ours,)))["critic"] == "environment_error"


def test_chat_pairs_every_call_with_its_answer() -> None:
    two_calls = factories.turn(
        0,
        calls=(factories.call("write"), factories.call("verify", path=".")),
        observations=("ok", "correct"),
    )
    done = factories.turn(1, thought="Done.", calls=(), observations=())
    chat = messages.chat(factories.trajectory(best=WON, turns=(two_calls, done)))
    assert [m["role"] for m in chat] == ["system", "user", "assistant", "tool", "tool", "assistant"]
    calls = chat[2]["tool_calls"]
    assert [c["id"] for c in calls] == [m["tool_call_id"] for m in chat[3:5]]
    assert all(len(c["id"]) == 9 and c["id"].isalnum() for c in calls)
    assert json.loads(calls[1]["function"]["arguments"]) == {"path": "."}
    assert (chat[4]["name"], chat[4]["content"]) == ("verify", "correct")
    assert chat[5]["tool_calls"] is None


def test_rejections_become_rows() -> None:
    lost = factories.rejection(5, kind=TrajectoryKind.REFERENCE)
    assert rows_of_rejection(lost) == [("rejected", "train", to_json(lost))]


def drop_nested(row: dict[str, Any]) -> None:
    del row["messages"][2]["tool_calls"][0]["function"]["arguments"]


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda r: r.update(extra=1), r"sft: missing keys \[\], unknown keys \['extra'\]"),
        (lambda r: r.pop("policy"), r"missing keys \['policy'\]"),
        (lambda r: r["messages"][0].update(extra=1), r"sft\.messages\[0\]: .*'extra'"),
        (drop_nested, r"sft\.messages\[2\]\.tool_calls\[0\]\.function: .*'arguments'"),
        (lambda r: r.update(problem_id=None), r"sft\.problem_id: null"),
        (lambda r: r.update(messages=None), r"sft\.messages: null"),
        (lambda r: r["messages"].append(None), r"sft\.messages\[6\]: null"),
        (lambda r: r.update(num_turns=2.0), r"num_turns: expected int, got float"),
        (lambda r: r.update(num_turns=True), r"num_turns: expected int, got bool"),
        (lambda r: r.update(reward=2), r"reward: expected float, got int"),
        (lambda r: r.update(reward=float("nan")), r"reward: nan is not finite"),
        (lambda r: r.update(policy="\ud800"), r"policy: not valid Unicode"),
        (lambda r: r.update(messages="text"), r"messages: expected a list"),
        (lambda r: r["messages"].__setitem__(0, "text"), r"messages\[0\]: expected a dict"),
    ],
)
def test_validation_names_the_field(damage: Callable[[dict[str, Any]], Any], match: str) -> None:
    row = copy.deepcopy(of_trajectory(factories.trajectory(best=WON))["sft"])
    assert validate("sft", row) is row
    damage(row)
    with pytest.raises(ValueError, match=match):
        validate("sft", row)


@pytest.mark.parametrize("target", Target)
def test_single_turn_prompt_follows_the_target(target: Target) -> None:
    text = single_turn.prompt(factories.problem(target=target))[1]["content"]
    assert ("nvcc" in text, "g++" in text) == (target is Target.CUDA, target is Target.CPU)
    assert "{" not in text.split("Rules:")[1], "every placeholder is filled"


def test_single_turn_answer_round_trips() -> None:
    fenced = SourceFile(path="kernels/a.cpp", text="// ```cpp\n// a fence inside\n// ````\n")
    files = {"model_new.py": "import cabi\n", fenced.path: fenced.text}
    text = "Here is my solution.\n\n" + single_turn.answer(files) + "\n\nIt is fast."
    assert single_turn.files_of_answer(text) == files
    assert text.index("model_new.py") < text.index("kernels/a.cpp")


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ([("kernels/a.cpp", "x")], "expected a block for `model_new.py`"),
        ([("model_new.py", "x"), ("model_new.py", "y")], "given twice"),
        ([("model_new.py", "x"), ("../../etc/passwd", "y")], "etc/passwd"),
        ([("model_new.py", "x"), ("kernels/run.sh", "y")], r"run\.sh"),
    ],
)
def test_single_turn_answers_out_of_form(files: list[tuple[str, str]], match: str) -> None:
    text = "\n".join(single_turn.answer({path: body}) for path, body in files)
    with pytest.raises(ValueError, match=match):
        single_turn.files_of_answer(text)
