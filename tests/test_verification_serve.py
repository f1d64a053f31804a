"""The server as others meet it: a real one on this CPU, asked over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from schemas.codec import content_id, from_json
from schemas.records import Target, Verdict, VerdictStatus
from tests import samples
from tests.serving import Served, served, shared_server
from verification.folder import FolderError
from verification.machine import MachineSettings
from verification.service.pool import PATIENCE_S, Pool, Ticket
from verification.service.pool_process import WorkerSettings
from verification.service.serve import Malformed, parse_request

TINY = samples.CODE.replace("4099, 1024", "67, 256")
OTHER = TINY.replace("scale, shift and gelu", "another")
WRONG = samples.KERNEL.replace("0.70710678f", "0.7f")


def body(
    code: str = TINY, model_new: str = samples.MODEL_NEW, kernel: str = WRONG, **more: Any
) -> dict[str, Any]:
    files = {"model_new.py": model_new, "kernels/scale_gelu.cpp": kernel}
    return {"problem": {"code": code}, "solution": {"files": files}, **more}


def slow(seconds: float, name: str) -> str:
    """A solution that takes its time, different from others by name."""
    late = f"import time; time.sleep({seconds})  # {name}\n        return out"
    return samples.MODEL_NEW.replace("return out", late)


@pytest.fixture
def server() -> Served:
    """Two workers, two places in the queue."""
    found = shared_server()
    found.wait(lambda: [w["state"] for w in found.workers()] == ["idle", "idle"])
    return found


def test_it_judges_and_remembers(server: Served) -> None:
    status, reply, _ = server.ask("/verify", body())
    verdict = from_json(Verdict, reply["verdict"])
    assert status == 200
    assert verdict.status is VerdictStatus.INCORRECT
    assert "doubt" in reply  # none, or too fast, as busy as this machine is
    started = time.perf_counter()
    assert server.ask("/verify", body())[1] == reply
    assert time.perf_counter() - started < 0.5
    status, health, _ = server.ask("/health")
    assert (status, health["status"], health["target"]) == (200, "ok", "cpu")
    assert health["isolation"]["limits"] is True
    assert server.ask("/stats")[1]["by_status"]["incorrect"] >= 1


def test_problems_keep_to_the_workers_that_have_them_open(server: Served) -> None:
    codes = [TINY.replace("scale, shift and gelu", name) for name in ("one", "another")]
    for name in ("a", "b", "c"):
        for code in codes:
            reply = server.ask("/verify", body(code, kernel=WRONG + f"// {name}\n"))[1]
            assert reply["verdict"]["status"] == "incorrect"
    opened = Counter(problem for w in server.workers() for problem in w["open_problems"])
    assert [opened[content_id(code)] for code in codes] == [1, 1]


def test_who_is_too_many_is_told_when_to_come_back(server: Served) -> None:
    """Two run, two wait, the others are turned away; those who were let in are answered."""
    requests = [body(TINY, slow(1.0, f"full {index}")) for index in range(8)]
    with ThreadPoolExecutor(8) as threads:
        replies = list(threads.map(lambda request: server.ask("/verify", request), requests))
    statuses = [status for status, _, _ in replies]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 4
    for status, reply, headers in replies:
        if status == 429:
            assert int(headers["Retry-After"]) >= 1
            assert "queue is full" in reply["error"]
        else:
            assert reply["verdict"]["status"] == "incorrect"


def test_equal_requests_are_one_job(server: Served) -> None:
    before = sum(server.ask("/stats")[1]["by_status"].values())
    request = body(TINY, slow(0.5, "equal"))
    with ThreadPoolExecutor(6) as threads:
        replies = list(threads.map(lambda _: server.ask("/verify", request)[1], range(6)))
    assert all(reply == replies[0] for reply in replies)
    assert sum(server.ask("/stats")[1]["by_status"].values()) == before + 1


def test_a_deadline_is_no_loss(server: Served) -> None:
    request = body(TINY, slow(1.0, "deadline"), deadline_s=0.3)
    status, reply, _ = server.ask("/verify", request)
    assert status == 504
    assert "ask again" in reply["error"]
    status, reply, _ = server.ask("/verify", {**request, "deadline_s": 60})
    assert (status, reply["verdict"]["status"]) == (200, "incorrect")


def test_a_killed_worker_costs_nobody_an_answer(server: Served) -> None:
    with ThreadPoolExecutor(2) as threads:
        requests = [body(TINY, slow(1.5, f"killed {index}")) for index in range(2)]
        coming = [threads.submit(server.ask, "/verify", request) for request in requests]
        server.wait(lambda: [w["state"] for w in server.workers()] == ["busy", "busy"])
        time.sleep(0.5)
        os.kill(server.workers()[0]["pid"], signal.SIGKILL)
        for answer in coming:
            status, reply, _ = answer.result(120)
            assert (status, reply["verdict"]["status"]) == (200, "incorrect")
    worker = server.workers()[0]
    assert worker["starts"] == 2
    assert "SIGKILL" in worker["last_failure"]


def test_a_worker_that_dies_idle_is_replaced(server: Served) -> None:
    before = server.workers()[1]
    os.kill(before["pid"], signal.SIGKILL)
    assert server.ask("/verify", body(kernel=WRONG + "// meanwhile\n"))[0] == 200
    server.wait(lambda: server.workers()[1]["starts"] > before["starts"])


def test_a_job_that_kills_every_worker_is_answered_with_500(server: Served) -> None:
    def kill() -> None:
        busy = server.wait(lambda: [w for w in server.workers() if w["state"] == "busy"])
        os.kill(busy[0]["pid"], signal.SIGKILL)
        server.wait(lambda: busy[0]["pid"] not in [w["pid"] for w in server.workers()])

    with ThreadPoolExecutor(1) as threads:
        coming = threads.submit(server.ask, "/verify", body(TINY, slow(3.0, "poison")))
        kill()
        kill()
        status, reply, _ = coming.result(120)
    assert status == 500
    assert "2 workers died over this job" in reply["error"]
    assert server.ask("/verify", body())[0] == 200


def test_a_problem_that_says_nothing_is_refused(server: Served) -> None:
    trivial = TINY.replace("F.gelu(x * self.weight)", "x + 1e-9 * x * self.weight")
    status, reply, _ = server.ask("/verify", body(trivial))
    assert status == 422
    assert "trivial_answer" in reply["error"]
    status, reply, _ = server.ask("/verify", body(trivial, accept_problem=True))
    assert status == 200
    assert reply["doubt"].startswith("trivial_answer")
    # Another solution: the problem is open by now, and refused all the same.
    assert server.ask("/verify", body(trivial, kernel=WRONG + "// two\n"))[0] == 422


def test_a_wrong_address_and_a_flood_are_errors_in_json(server: Served) -> None:
    assert server.ask("/nothing")[0] == 404
    assert server.ask("/verify")[0] == 405
    status, reply, _ = server.ask("/verify", b"[" + b" " * (17 << 20) + b"]")
    assert status == 413
    assert reply["error"]
    status, reply, _ = server.ask("/verify", b"{")
    assert (status, reply["about"]) == (400, "request")
    status, reply, _ = server.ask("/verify", {**body(), "solution": {"files": {"x": ""}}})
    assert (status, reply["about"]) == (400, "solution")


@pytest.mark.slow  # a server of its own
def test_it_finishes_what_runs_and_tells_who_waits(tmp_path: Path) -> None:
    """With a token, which a worker does not see."""
    peek = "import os\nassert 'SECRET_NAME' not in os.environ\n"
    headers = {"Authorization": "Bearer s3cret"}
    options = ("--workers_per_device=1", "--token_env=SECRET_NAME")
    with (
        served(tmp_path, *options, env={"SECRET_NAME": "s3cret"}) as server,
        ThreadPoolExecutor(2) as threads,
    ):
        server.wait(lambda: server.ask("/health")[0] == 200)
        assert server.ask("/verify", body())[0] == 401
        assert server.ask("/verify", body(), {"Authorization": "Bearer other"})[0] == 401
        assert server.ask("/stats")[0] == 401
        running = threads.submit(
            server.ask, "/verify", body(TINY, peek + slow(1.5, "runs")), headers
        )
        server.wait(lambda: server.ask("/stats", headers=headers)[1]["running"])
        waiting = threads.submit(server.ask, "/verify", body(OTHER), headers)
        server.wait(lambda: server.ask("/stats", headers=headers)[1]["queue"])
        server.process.send_signal(signal.SIGTERM)
        assert running.result(120)[1]["verdict"]["status"] == "incorrect"
        status, reply, _ = waiting.result(120)
        assert (status, reply["error"]) == (503, "the verifier is shutting down")
        assert server.process.wait(60) == 0


def test_who_is_preferred_does_not_keep_others_waiting_for_ever() -> None:
    """Jobs whose problem a worker has open go first, until another has waited for long."""
    settings = MachineSettings(target=Target.CPU, device="cpu", store="unused", cache="unused")

    async def scenario() -> list[bool]:
        pool = Pool([WorkerSettings(machine=settings)], max_queue=3)
        oldest, newer = (
            parse_request(json.dumps(body(code)).encode(), Target.CPU)[0] for code in (OTHER, TINY)
        )
        chosen = []
        for waited_s in (1.0, PATIENCE_S + 1.0):
            tickets = [
                Ticket(job=job, answer=asyncio.get_running_loop().create_future())
                for job in (oldest, newer)
            ]
            tickets[0].asked -= waited_s
            pool._queue.extend(tickets)
            worker = pool._workers[0]
            worker.open = (newer.problem.problem_id,)
            chosen.append(pool._choose(worker) is tickets[1])
            pool._queue.clear()
        return chosen

    assert asyncio.run(scenario()) == [True, False]


def test_what_waits_is_built_ahead_once_and_in_turn() -> None:
    async def scenario() -> list[str | None]:
        pool = Pool([], max_queue=3)
        asked = [body(kernel=f"{WRONG}// {name}") for name in "ab"]
        jobs = [parse_request(json.dumps(one).encode(), Target.CPU)[0] for one in asked]
        for job in jobs:
            pool.submit(job)
        order = {job.solution.solution_id: name for job, name in zip(jobs, "ab", strict=True)}
        found = [pool._ahead() for _ in range(3)]
        return [order[job.solution.solution_id] if job else None for job in found]

    assert asyncio.run(scenario()) == ["a", "b", None]


MALFORMED: dict[str, tuple[Any, str]] = {
    "not JSON": (b"{", "body: expected JSON"),
    "too deep": (b"[" * 200_000, "body: expected JSON"),
    "a list": (b"[]", "problem: expected to find it in an object, got list"),
    "no problem": ({"problem": None}, "problem: expected dict, got NoneType"),
    "no code": ({"problem": {}}, "code: expected str, got NoneType"),
    "files of numbers": ({"solution": {"files": {"model_new.py": 3}}}, "expected str, got int"),
    "a file twice": (
        {"solution": {"files": [{"path": "model_new.py", "text": ""}] * 2}},
        "expected each path once",
    ),
    "an effort": ({"effort": "most"}, "effort: expected reward, publish, got 'most'"),
    "a deadline": ({"deadline_s": -1}, "deadline_s: expected seconds, got -1"),
    "a deadline of yes": ({"deadline_s": True}, "deadline_s: expected int | float, got bool"),
    "a target": (
        {"problem": {"code": TINY, "target": "cuda"}},
        "expected cpu, which is served here, got 'cuda'",
    ),
    "a precision": (
        {"problem": {"code": TINY, "precision": "fp8"}},
        "precision: expected bf16, tf32, fp32, got 'fp8'",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_malformed_is_told_with_expected_and_got(name: str) -> None:
    change, error = MALFORMED[name]
    data = change if isinstance(change, bytes) else json.dumps({**body(), **change}).encode()
    with pytest.raises(Malformed) as raised:
        parse_request(data, Target.CPU)
    assert error in str(raised.value)


def test_half_a_character_is_no_text() -> None:
    """JSON can spell what UTF-8 cannot hold."""
    with pytest.raises(FolderError, match="half a character"):
        parse_request(json.dumps(body(TINY, "x = '\ud800'")).encode(), Target.CPU)


def test_files_may_come_as_the_dataset_has_them() -> None:
    files = [{"path": path, "text": text} for path, text in body()["solution"]["files"].items()]
    one, _ = parse_request(json.dumps(body()).encode(), Target.CPU)
    two, _ = parse_request(
        json.dumps({**body(), "solution": {"files": files, "form": "cabi"}}).encode(), Target.CPU
    )
    assert one == two
