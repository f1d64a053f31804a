"""Records as rows of the published configs, each placed as (config, split, row).

What a config does not take comes back as a row of `rejected` with stage `export` and reason
`config.reason`, so for every training config: rows it could have = rows it has + its rows in
`rejected`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from schemas.codec import to_json
from schemas.records import Admission, Neighbour, Problem, Rejection, RejectStage, Trajectory
from training_export import columns, rules, single_turn
from training_export.columns import Row
from training_export.rules import ExportSettings, Refusal
from training_export.validate import validate

Placed = tuple[str, str, Row]
"""Config, split and row."""


@dataclass(frozen=True, kw_only=True)
class AgentPrompt:
    """What the agent is shown at the start of a rollout of one problem."""

    system: str
    user: str

    def chat(self) -> list[dict[str, str]]:
        return [
            {"role": "system", "content": self.system},
            {"role": "user", "content": self.user},
        ]


def rows_of_problem(
    problem: Problem,
    admission: Admission,
    neighbour: Neighbour,
    prompt: AgentPrompt,
    settings: ExportSettings,
) -> list[Placed]:
    """Rows of a kept problem in `problems`, `ppo_warmup` and `rl`, and what these two did not take.

    Raises ValueError when the three records are not about one admitted problem, or a row does not
    fit its schema.
    """
    _same_problem(problem, admission, neighbour)
    placed = [("problems", neighbour.split, columns.problem_row(problem, admission, neighbour))]
    chats = {"ppo_warmup": single_turn.prompt(problem), "rl": prompt.chat()}
    for config, chat in chats.items():
        refusals = rules.refuse_problem(config, admission, neighbour, settings)
        if (refusal := next(refusals, None)) is not None:
            placed.append(_refused(config, refusal, problem, None))
        else:
            row = columns.verl_row(problem, admission, neighbour, chat)
            placed.append((config, neighbour.split, row))
    return _validated(placed)


def rows_of_trajectory(
    problem: Problem,
    admission: Admission,
    neighbour: Neighbour,
    trajectory: Trajectory,
    settings: ExportSettings,
) -> list[Placed]:
    """Rows of a rollout in `trajectories`, `sft` and `critic`, and what these did not take.

    A trajectory goes where its problem goes, so no problem stands in both splits. Raises
    ValueError as above.
    """
    _same_problem(problem, admission, neighbour)
    if trajectory.problem_id != problem.problem_id:
        raise ValueError(
            f"trajectory {trajectory.trajectory_id} is of {trajectory.problem_id}, "
            f"expected {problem.problem_id}"
        )
    refusals: dict[str, Iterator[Refusal]] = {
        "trajectories": rules.refuse_trajectory(trajectory),
        "sft": rules.refuse_sft(trajectory, neighbour, settings),
        "critic": rules.refuse_critic(trajectory, neighbour, settings),
    }
    placed: list[Placed] = []
    for config, found in refusals.items():
        if (refusal := next(found, None)) is not None:
            placed.append(_refused(config, refusal, problem, trajectory))
            continue
        row = columns.trajectory_row(problem, admission, trajectory)
        if config != "trajectories":
            row = columns.chat_row(config, row, settings.tools)
        placed.append((config, neighbour.split, row))
    return _validated(placed)


def rows_of_rejection(rejection: Rejection) -> list[Placed]:
    """The row of a rejection. Raises ValueError when it does not fit its schema."""
    return _validated([("rejected", "train", to_json(rejection))])


def _validated(placed: list[Placed]) -> list[Placed]:
    return [(config, split, validate(config, row)) for config, split, row in placed]


def _same_problem(problem: Problem, admission: Admission, neighbour: Neighbour) -> None:
    ids = (problem.problem_id, admission.problem_id, neighbour.problem_id)
    if len(set(ids)) != 1:
        raise ValueError(f"problem, admission and neighbour are of different problems: {ids}")
    if admission.reason is not None:
        raise ValueError(f"problem {ids[0]} was not admitted ({admission.reason}): reject it")


def _refused(
    config: str, refusal: Refusal, problem: Problem, trajectory: Trajectory | None
) -> Placed:
    reason, detail = refusal
    rejection = Rejection(
        problem_id=problem.problem_id,
        index=problem.index,
        stage=RejectStage.EXPORT,
        reason=f"{config}.{reason}",
        detail=detail,
        kind=trajectory.kind if trajectory else None,
    )
    return "rejected", "train", to_json(rejection)
