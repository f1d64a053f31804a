"""Rewards through a real verifier, in the signatures of verl and TRL."""

from __future__ import annotations

import inspect
import socket
import threading
from typing import Any

import pytest

from tests import factories, samples
from tests.serving import shared_server
from training_export import reward_functions, single_turn, verifier_client
from training_export.columns import verl_row
from training_export.reward_functions import (
    compute_score,
    compute_score_batch,
    ops6k_reward,
    solution_of_completion,
)
from training_export.verifier_client import Verifier, VerifierError

TINY = samples.CODE.replace("4099, 1024", "67, 256")
FILES = {"model_new.py": samples.MODEL_NEW, "kernels/scale_gelu.cpp": samples.KERNEL}
WRONG = FILES | {"kernels/scale_gelu.cpp": samples.KERNEL.replace("0.70710678f", "0.7f")}
ALONE = "import torch\n\n\nclass ModelNew(torch.nn.Module):\n    pass\n"
NOBODY = "http://127.0.0.1:1"


@pytest.fixture(scope="module")
def url() -> str:
    server = shared_server()
    server.wait(lambda: server.ask("/health")[0] == 200)
    return server.url


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(verifier_client.URL_VARIABLE, raising=False)
    monkeypatch.setattr(verifier_client, "_backoff", lambda attempt: 0.01)


def row(code: str = TINY) -> dict[str, Any]:
    """A row of `ppo_warmup`, as published."""
    kept = factories.kept(code=code)
    prompt = single_turn.prompt(kept.problem)
    return verl_row(kept.problem, kept.admission, kept.neighbour, prompt)


def verl(completion: str, url: str | None, **more: Any) -> Any:
    """As verl's reward managers call it: by keyword."""
    found = row()
    return compute_score(
        data_source=found["data_source"],
        solution_str=completion,
        ground_truth=found["reward_model"]["ground_truth"],
        extra_info=found["extra_info"],
        url=url,
        **more,
    )


def test_verl_gets_a_number(url: str) -> None:
    assert verl(single_turn.answer(WRONG), url) == -1.0
    assert verl("I would rather not.", url) == -1.0
    assert verl(single_turn.answer(FILES), url) in (1.0, 2.0, 3.0)


def test_verl_gets_the_same_details_every_time(url: str) -> None:
    """verl gathers them into columns of equal length."""
    found = [
        verl(text, url, details=True)
        for text in (single_turn.answer(WRONG), single_turn.answer(FILES), "nothing")
    ]
    assert [f["status"] for f in found][::2] == ["incorrect", "no_solution"]
    assert [f["correct"] for f in found] == [0.0, 1.0, 0.0]
    assert {tuple(f) for f in found} == {
        ("score", "status", "correct", "faster_than_eager", "faster_than_compile")
    }


def test_verl_gets_a_batch_in_order(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the server's two places in the queue: who is turned away comes again."""
    monkeypatch.setenv(verifier_client.URL_VARIABLE, url)
    texts = [single_turn.answer(WRONG | {"kernels/note.h": f"// {i}\n"}) for i in range(7)]
    texts.insert(3, single_turn.answer(FILES))
    found = row()
    scores = compute_score_batch(
        data_sources=[found["data_source"]] * 8,
        solution_strs=texts,
        ground_truths=[TINY] * 8,
        extra_infos=[found["extra_info"]] * 8,
    )
    assert isinstance(scores[3], float)
    assert scores[3] >= 1.0
    assert scores[:3] + scores[4:] == [-1.0] * 7


def test_trl_gets_a_list(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As GRPOTrainer calls it: prompts, completions and the dataset's columns, all as lists."""
    monkeypatch.setenv(verifier_client.URL_VARIABLE, url)
    texts = [single_turn.answer(WRONG), "nothing", single_turn.answer(FILES)]
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    rows = [row() for _ in texts]
    columns: dict[str, Any] = {
        name: [r[name] for r in rows] for name in rows[0] if name != "prompt"
    }
    prompts = [r["prompt"] for r in rows]
    rewards = ops6k_reward(
        prompts=prompts, completions=chats, completion_ids=[[0]] * 3, trainer_state=None, **columns
    )
    assert rewards[:2] == [-1.0, -1.0]
    assert rewards[2] >= 1.0
    assert ops6k_reward(prompts, texts, code=[TINY] * 3, precision=["fp32"] * 3) == rewards
    with pytest.raises(ValueError, match="expected the dataset's column 'reward_model' or 'code'"):
        ops6k_reward(prompts, texts)


def test_signatures_are_what_the_libraries_call() -> None:
    """Keywords they add in later versions must not break a run."""
    verl_names = list(inspect.signature(compute_score).parameters)
    assert verl_names[:4] == ["data_source", "solution_str", "ground_truth", "extra_info"]
    assert list(inspect.signature(ops6k_reward).parameters)[:2] == ["prompts", "completions"]
    for function in (compute_score, compute_score_batch, ops6k_reward):
        kinds = [p.kind for p in inspect.signature(function).parameters.values()]
        assert kinds[-1] is inspect.Parameter.VAR_KEYWORD


def test_no_verifier_is_never_a_number() -> None:
    answer = single_turn.answer(FILES)
    with pytest.raises(VerifierError, match="found none: start one"):
        verl(answer, None)
    with pytest.raises(VerifierError, match=r"no verdict from .* after 5 failures"):
        verl(answer, NOBODY)
    with pytest.raises(VerifierError):
        ops6k_reward(["p"], [answer], url=NOBODY, code=[TINY])
    assert ops6k_reward(["p"], [answer], url=NOBODY, code=[TINY], unscored=0.5) == [0.5]
    assert verl(answer, NOBODY, unscored=0.5, details=True)["status"] == "unscored"


def test_a_refused_problem_is_no_fault_of_the_policy(url: str) -> None:
    trivial = TINY.replace("F.gelu(x * self.weight)", "x + 1e-9 * x * self.weight")
    with pytest.raises(VerifierError, match=r"422.*trivial_answer"):
        compute_score("torch#2", single_turn.answer(FILES), trivial, url=url)


def test_a_solution_that_cannot_be_read_is_the_policys_fault(url: str) -> None:
    huge = single_turn.answer(FILES | {"kernels/huge.h": "//" * (2 << 20)})
    assert verl(huge, url, details=True)["status"] == "no_solution"


def test_another_target_is_an_error_not_a_reward(url: str) -> None:
    with pytest.raises(VerifierError, match=r"400.*expected cpu"):
        compute_score("", single_turn.answer(FILES), TINY, {"target": "cuda"}, url=url)


def replies(*answers: bytes) -> tuple[str, list[bytes]]:
    """A server on one port that gives these answers, one a connection; and what it was sent."""
    listener = socket.create_server(("127.0.0.1", 0))
    sent: list[bytes] = []

    def serve() -> None:
        with listener:
            for answer in answers:
                client, _ = listener.accept()
                with client:
                    sent.append(client.recv(1 << 20))
                    client.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}", sent


def http(status: int, body: bytes, header: str = "") -> bytes:
    head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\nConnection: close\r\n{header}"
    return head.encode() + b"\r\n" + body


def test_what_passes_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full queue, a late verdict, an answer that breaks off, a failure; then it is refused."""
    pauses: list[float] = []
    monkeypatch.setattr(verifier_client.time, "sleep", pauses.append)
    url, sent = replies(
        http(429, b'{"error": "full"}', "Retry-After: 7\r\n"),
        http(504, b'{"error": "late"}'),
        b"HTTP/1.1 200",
        http(500, b"oops"),
        http(400, b'{"error": "no", "about": "request"}'),
    )
    with pytest.raises(VerifierError, match="400: no"):
        Verifier.find(url).verify(TINY, FILES)
    assert len(sent) == 5
    assert len(pauses) == 4
    assert 4.9 <= pauses[0] <= 9.1  # about as long as it was told


def test_another_version_of_a_verdict_is_told() -> None:
    url, _ = replies(http(200, b'{"verdict": {"status": "correct"}}'))
    with pytest.raises(VerifierError, match="do client and server run the same version"):
        Verifier.find(url).verify(TINY, FILES)


COMPLETIONS = {
    "paths in backquotes": (single_turn.answer(FILES), FILES),
    "names in fences": (
        "Here:\n```cpp kernels/a.cu\nint x;\n```\nand\n```python:model_new.py\n" + ALONE + "```\n",
        {"kernels/a.cu": "int x;\n", "model_new.py": ALONE},
    ),
    "one block": (f"Sure.\n```python\n{ALONE}```\nDone.", {"model_new.py": ALONE}),
    "the last of several": (
        f"```python\nclass ModelNew: ...\n```\nBetter:\n```python\n{ALONE}```\n```sh\nls\n```",
        {"model_new.py": ALONE},
    ),
    "thoughts before": (
        f"<think>```python\nclass ModelNew: 1\n```</think>\n```python\n{ALONE}```",
        {"model_new.py": ALONE},
    ),
}


@pytest.mark.parametrize("name", COMPLETIONS)
def test_a_solution_is_read_from_a_completion(name: str) -> None:
    text, files = COMPLETIONS[name]
    assert solution_of_completion(text) == files


@pytest.mark.parametrize("text", ["", "no", "```python\nx = 1\n```", "<think>```python\n" + ALONE])
def test_no_solution_is_an_error_with_a_reason(text: str) -> None:
    with pytest.raises(ValueError, match="no solution in"):
        solution_of_completion(text)


def test_the_file_loads_by_path_as_verl_does() -> None:
    import importlib.util
    import sys

    spec = importlib.util.spec_from_file_location("custom_module", reward_functions.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["custom_module"] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules["custom_module"]
    assert callable(module.compute_score)
