"""Rewards for verl and TRL from a running verifier, in the signatures those two call.

    verl   custom_reward_function.path=…/training_export/reward_functions.py
           custom_reward_function.name=compute_score     (or compute_score_batch, with
           reward_model.reward_manager=batch, which asks for a whole batch at once)
    TRL    GRPOTrainer(reward_funcs=ops6k_reward, …)

on the rows of `ppo_warmup` and `rl` as they are. The verifier's address comes from the argument
`url` or from $OPS6K_VERIFIER_URL. Rewards are those of `training_export.rewards`: -1, 1, 2, 3.

A completion without a readable solution is worth -1, like a wrong one: the policy wrote it. What
the verifier could not decide (it is unreachable, its own side failed, the problem is refused) is
tried again and then raised. A made-up number would train on noise, and both libraries would make
one: verl averages what it is given, TRL counts a row whose rewards are all None as 0, which here
lies between wrong and correct. Who prefers to go on sets `unscored` to a number, and sees it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from schemas.records import Verdict
from training_export.rewards import faster, reward
from training_export.single_turn import files_of_answer
from training_export.verifier_client import SolutionRefused, Verifier, VerifierError

FAILED = -1.0
PARALLEL = 64
"""Requests under way at once; the verifier's queue holds them."""
_CLASS = ("precision", "target")
"""What a row knows of its problem beside the text."""

_THOUGHT = re.compile(r"\A.*</think>", re.DOTALL)
_BLOCK = re.compile(
    r"^(?P<fence>`{3,})(?P<info>[^`\n]*)\n(?P<text>.*?)^(?P=fence)[ \t]*$", re.MULTILINE | re.DOTALL
)
_NAMED = re.compile(r"(model_new\.py|kernels/[A-Za-z0-9_./-]+)")
_DEFINES = re.compile(r"^class\s+ModelNew\b", re.MULTILINE)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    url: str | None = None,
    details: bool = False,
    unscored: float | None = None,
    **kwargs: Any,
) -> float | dict[str, Any]:
    """The reward of one completion, as verl calls it.

    `ground_truth` is the problem's text. `details`: a dict with `score` and what led to it, the
    same keys every time. Raises VerifierError when there is no verdict, unless `unscored` says
    what that is worth.
    """
    extra = extra_info or {}
    more = {name: extra[name] for name in _CLASS if extra.get(name)}
    verifier = Verifier.find(url)
    return _score(verifier, ground_truth, solution_str, more, details, unscored)


def compute_score_batch(
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[str],
    extra_infos: Sequence[dict[str, Any] | None],
    **kwargs: Any,
) -> list[float | dict[str, Any]]:
    """`compute_score` of a batch, all requests at once, as verl's batch manager calls it."""
    rows = zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)
    return _at_once(lambda row: compute_score(*row, **kwargs), list(rows))


def ops6k_reward(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    url: str | None = None,
    unscored: float | None = None,
    **kwargs: Any,
) -> list[float]:
    """The rewards of a batch of completions, as TRL's GRPOTrainer calls it.

    The problem's text comes from the dataset's column `reward_model` (configs `ppo_warmup`, `rl`)
    or `code` (config `problems`), which TRL hands over as lists. Completions are texts or chats.
    Raises VerifierError as above, ValueError when neither column is there.
    """
    verifier = Verifier.find(url)
    rows = list(zip(_problems(kwargs, len(completions)), map(_text, completions), strict=True))
    scores = _at_once(
        lambda row: _score(verifier, row[0][0], row[1], row[0][1], False, unscored), rows
    )
    return [float(score) for score in scores]


def solution_of_completion(text: str) -> dict[str, str]:
    """The files of the solution in a completion, {path: text}. Raises ValueError without one.

    Either every file as its path in backquotes above a fenced block, as the prompts of
    `ppo_warmup` ask for; or blocks whose first line names the file (```cpp kernels/fused.cu); or
    one self-contained Python block that defines `ModelNew`, the last one if there are several.
    What stands before `</think>` does not count.
    """
    answer = _THOUGHT.sub("", text)
    try:
        return files_of_answer(answer)
    except ValueError as error:
        refusal = error
    named: dict[str, str] = {}
    alone: list[str] = []
    for block in _BLOCK.finditer(answer):
        info = _NAMED.search(block["info"])
        if info is not None:
            named[info[1]] = block["text"]
        elif _DEFINES.search(block["text"]):
            alone.append(block["text"])
    if "model_new.py" in named:
        return named
    if alone:
        return {**named, "model_new.py": alone[-1]}
    raise ValueError(f"no solution in {len(text)} characters: {refusal}")


def _score(
    verifier: Verifier,
    code: str,
    completion: str,
    more: dict[str, Any],
    details: bool,
    unscored: float | None,
) -> float | dict[str, Any]:
    verdict: Verdict | None = None
    try:
        verdict = verifier.verify(code, solution_of_completion(completion), **more)
        status, value = str(verdict.status), reward(verdict)
    except VerifierError:
        if unscored is None:
            raise
        status, value = "unscored", unscored
    except (SolutionRefused, ValueError):  # what the policy wrote is no solution
        status, value = "no_solution", FAILED
    if value is None:
        raise VerifierError(f"a verdict without a reward: {status}")
    if not details:
        return value
    return {
        "score": value,
        "status": status,
        "correct": float(verdict is not None and verdict.passed),
        "faster_than_eager": float(verdict is not None and faster(verdict.speedup_eager)),
        "faster_than_compile": float(verdict is not None and faster(verdict.speedup_compile)),
    }


def _problems(columns: dict[str, Any], count: int) -> list[tuple[str, dict[str, str]]]:
    """Of each row the problem's text and what is known of its class."""
    if "code" in columns:
        codes = list(columns["code"])
    elif "reward_model" in columns:
        codes = [row["ground_truth"] for row in columns["reward_model"]]
    else:
        raise ValueError(
            "expected the dataset's column 'reward_model' or 'code' with the problem's text, got "
            f"{sorted(columns)}: keep it in the dataset that the trainer gets"
        )
    classes: list[dict[str, str]] = [
        {name: extra[name] for name in _CLASS if extra.get(name)}
        for extra in columns.get("extra_info") or [{} for _ in range(count)]
    ]
    for name in _CLASS:
        for known, value in zip(classes, columns.get(name) or [], strict=False):
            known[name] = value
    return list(zip(codes, classes, strict=True))


def _text(completion: Any) -> str:
    """A completion as text: of a chat the last message of the assistant."""
    if isinstance(completion, str):
        return completion
    said = [m["content"] for m in completion if m.get("role", "assistant") == "assistant"]
    return str(said[-1] or "") if said else ""


def _at_once(score: Callable[[Any], Any], rows: Iterable[Any]) -> list[Any]:
    """In the order of the rows; the first error is raised when all have ended."""
    with ThreadPoolExecutor(PARALLEL) as threads:
        return list(threads.map(score, rows))
