"""Records as row dicts, one function per kind of row; `rows.py` decides which are wanted."""

from __future__ import annotations

from typing import Any

from schemas.arrow import SCHEMAS
from schemas.codec import to_json
from schemas.records import (
    Admission,
    Check,
    Environment,
    Interval,
    Measurement,
    Neighbour,
    Problem,
    Trajectory,
    Turn,
    Verdict,
)
from training_export import messages, rewards
from training_export.rules import in_speed_split

Row = dict[str, Any]


def problem_row(problem: Problem, admission: Admission, neighbour: Neighbour) -> Row:
    """A row of `problems`."""
    return {
        "problem_id": problem.problem_id,
        "ops": list(problem.ops),
        "data_source": problem.data_source,
        "families": list(problem.families),
        **_class_columns(problem),
        "operators": list(admission.operators),
        "cluster_id": neighbour.cluster_id,
        "kernelbench_id": neighbour.kernelbench_id,
        "kernelbench_similarity": neighbour.kernelbench_similarity,
        "near_miss": neighbour.near_miss,
        "eager_ms": admission.eager_ms,
        "compile_ms": admission.compile_ms,
        "roofline_ms": admission.roofline_ms,
        "headroom": admission.headroom,
        "speed_split": in_speed_split(admission),
        "min_bytes": admission.min_bytes,
        "flops": admission.flops,
        **_environment_columns(admission.environment),
        "seed": problem.seed,
        "index": problem.index,
        "code": problem.code,
    }


def verl_row(
    problem: Problem, admission: Admission, neighbour: Neighbour, prompt: list[dict[str, str]]
) -> Row:
    """A row of `ppo_warmup` or `rl`, in the columns verl reads."""
    return {
        "problem_id": problem.problem_id,
        "data_source": problem.data_source,
        "ability": f"{problem.target}_kernels",
        "reward_model": {"style": "rule", "ground_truth": problem.code},
        "extra_info": {
            "split": neighbour.split,
            "index": problem.index,
            "problem_id": problem.problem_id,
            **_class_columns(problem),
            "headroom": admission.headroom,
            "speed_split": in_speed_split(admission),
            "eager_ms": admission.eager_ms,
            "compile_ms": admission.compile_ms,
        },
        "prompt": prompt,
    }


def trajectory_row(problem: Problem, admission: Admission, trajectory: Trajectory) -> Row:
    """A row of `trajectories`. Raises ValueError when the rollout is malformed."""
    last = next((t.verdict for t in reversed(trajectory.turns) if t.verdict is not None), None)
    verdict = trajectory.verdict or last
    return {
        "trajectory_id": trajectory.trajectory_id,
        "problem_id": trajectory.problem_id,
        "kind": str(trajectory.kind),
        "policy": trajectory.policy,
        **_class_columns(problem),
        "headroom": admission.headroom,
        "speed_split": in_speed_split(admission),
        "stop_reason": str(trajectory.stop_reason),
        "detail": trajectory.detail,
        "num_turns": len(trajectory.turns),
        "reward": rewards.trajectory_reward(trajectory),
        **_verdict_columns(verdict),
        "solution": to_json(trajectory.solution),
        "turns": [_turn(turn) for turn in trajectory.turns],
        "messages": messages.chat(trajectory),
    }


def chat_row(config: str, row: Row, tools: str) -> Row:
    """A row of `sft` or `critic` from the row of `trajectories` it retells."""
    extra: Row = {"tools": tools}
    if config == "critic":
        extra["rewards"] = rewards.outcome_rewards(row["reward"], row["num_turns"])
        extra["returns"] = rewards.returns(extra["rewards"])
    return {name: extra[name] if name in extra else row[name] for name in SCHEMAS[config].names}


def _class_columns(problem: Problem) -> Row:
    return {
        "target": str(problem.target),
        "precision": str(problem.precision),
        "num_ops": len(problem.ops),
    }


def _environment_columns(environment: Environment | None) -> Row:
    return {name: getattr(environment, name, None) for name in Environment.__dataclass_fields__}


def _verdict_columns(verdict: Verdict | None) -> Row:
    """What a verdict measured, flat; all null without one."""
    worst = _nearest_to_budget(verdict.checks) if verdict else None
    return {
        "status": str(verdict.status) if verdict else None,
        "solution_median_ms": _median(verdict.solution) if verdict else None,
        "eager_median_ms": _median(verdict.eager) if verdict else None,
        "compile_median_ms": _median(verdict.compile) if verdict else None,
        **_interval("speedup_eager", verdict.speedup_eager if verdict else None),
        **_interval("speedup_compile", verdict.speedup_compile if verdict else None),
        "aa_control_low": verdict.aa_control.low if verdict and verdict.aa_control else None,
        "aa_control_high": verdict.aa_control.high if verdict and verdict.aa_control else None,
        "num_checks": len(verdict.checks) if verdict else None,
        "max_error": worst.error if worst else None,
        "error_budget": worst.budget if worst else None,
        "effort": verdict.effort if verdict else None,
        "build_s": verdict.build_s if verdict else None,
        "harness": verdict.harness if verdict else None,
        **_evidence(verdict),
        "isolation": to_json(verdict.isolation) if verdict else None,
        **_environment_columns(verdict.environment if verdict else None),
    }


def _evidence(verdict: Verdict | None) -> Row:
    """What else is known about a verdict: null where nothing could be found out."""
    work = verdict.attribution if verdict else None
    state = verdict.device_state if verdict else None
    return {
        "labels": list(verdict.labels) if verdict else None,
        "processes": verdict.processes if verdict else None,
        "knocked_out": work.knocked_out if work else None,
        "own_share": work.own_share if work else None,
        "sm_clock_mhz": state.sm_clock_mhz if state else None,
    }


def _nearest_to_budget(checks: tuple[Check, ...]) -> Check | None:
    """The check whose error is the largest share of its budget, among those that have both."""
    compared = [(c.error / c.budget, c) for c in checks if c.error is not None and c.budget]
    return max(compared, key=lambda pair: pair[0])[1] if compared else None


def _median(measurement: Measurement | None) -> float | None:
    return measurement.median_ms if measurement else None


def _interval(name: str, interval: Interval | None) -> Row:
    return {
        name: interval.point if interval else None,
        f"{name}_low": interval.low if interval else None,
        f"{name}_high": interval.high if interval else None,
    }


def _turn(turn: Turn) -> Row:
    return {
        "index": turn.index,
        "layer": str(turn.layer) if turn.layer else None,
        "gain": turn.gain,
        "status": str(turn.verdict.status) if turn.verdict else None,
        "reward": rewards.turn_reward(turn),
        "solution_id": turn.solution_id,
        "thought": turn.thought,
        "calls": to_json(turn.calls),
        "observations": list(turn.observations),
    }
