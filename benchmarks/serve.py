"""Verdicts a minute: one after the other in one process, and through a server with many clients.

    python -m benchmarks.serve PROBLEM.py SOLUTION... --count=60 --workers=1,2,4 --json=FILE

Every request is a solution nobody has seen: one of the given ones, in turn, with a comment of its
own in every file, so that nothing comes from a store or a build cache. The problem is open before
the clock starts. Each way starts from an empty store; builds of the baseline are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from schemas.codec import to_json
from schemas.records import Precision, Problem, Solution, Target
from training_export.run_record import git_commit
from verification.folder import read_problem, read_solution
from verification.machine import Machine, MachineSettings
from verification.service.pool_process import Job
from verification.service.pool_worker import Judges

ROOT = Path(__file__).resolve().parent.parent
CLIENTS_PER_WORKER = 3


def main() -> None:
    options = _options()
    target = Target(options.target)
    problem = read_problem(options.problem, target, Precision(options.precision))
    given = [read_solution(path).solution for path in options.solutions]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        settings = MachineSettings(
            target=target,
            device="cpu" if target is Target.CPU else options.devices.split(",")[0],
            store=str(root / "alone"),
            cache=str(root / "cache"),
        )
        machine = Machine(settings)
        environment = machine.environment
        with contextlib.closing(machine), contextlib.closing(Judges(machine)) as judges:
            ask = functools.partial(_ask_judges, judges, problem)
            rows.append(_measure("one by one", 1, ask, given, options.count))
        for workers in map(int, options.workers.split(",")):
            with _server(root, options, workers) as url:
                ask = functools.partial(_ask_server, url, problem)
                clients = CLIENTS_PER_WORKER * workers * len(options.devices.split(","))
                name = f"server, {workers} workers a device"
                rows.append(_measure(name, clients, ask, given, options.count))
    result = {
        "command": sys.argv,
        "commit": git_commit(str(ROOT)),
        "environment": environment,
        "rows": rows,
    }
    if options.json:
        Path(options.json).write_text(json.dumps(to_json(result), indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("problem")
    parser.add_argument("solutions", nargs="+", help="folders, used in turn")
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--devices", default="cpu", help="cpu, or cuda:0,cuda:1")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--workers", default="1,2", help="workers a device, one server for each")
    parser.add_argument("--json", default=None)
    return parser.parse_args()


def _measure(
    name: str,
    clients: int,
    ask: Callable[[Solution], str],
    given: list[Solution],
    count: int,
) -> dict[str, Any]:
    """Verdicts a minute of `count` unseen solutions asked for by so many clients at once."""
    warm = [_unseen(given[0], f"{name} warm {i}") for i in range(clients)]
    asked = [_unseen(given[i % len(given)], f"{name} {i}") for i in range(count)]
    with ThreadPoolExecutor(clients) as threads:
        list(threads.map(ask, warm))
        started = time.perf_counter()
        statuses = Counter(threads.map(ask, asked))
        seconds = time.perf_counter() - started
    row = {
        "name": name,
        "clients": clients,
        "count": count,
        "seconds": round(seconds, 2),
        "verdicts_per_minute": round(count / seconds * 60, 1),
        "statuses": dict(statuses),
    }
    print(json.dumps(row), flush=True)
    return row


def _unseen(solution: Solution, name: str) -> Solution:
    comment = {True: f"# {name}\n", False: f"// {name}\n"}
    files = {f.path: comment[f.path.endswith(".py")] + f.text for f in solution.files}
    return Solution.of(files, solution.form)


def _ask_judges(judges: Judges, problem: Problem, solution: Solution) -> str:
    job = Job(problem=problem, solution=solution, effort="reward", accept_problem=False)
    return judges.answer(job)["verdict"]["status"]


def _ask_server(url: str, problem: Problem, solution: Solution) -> str:
    files = {file.path: file.text for file in solution.files}
    body = {
        "problem": {"code": problem.code, "precision": str(problem.precision)},
        "solution": {"form": solution.form, "files": files},
    }
    request = urllib.request.Request(f"{url}/verify", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=900) as response:
        return json.loads(response.read())["verdict"]["status"]


@contextlib.contextmanager
def _server(root: Path, options: argparse.Namespace, workers: int) -> Iterator[str]:
    """A server with an empty store; what was compiled before stays."""
    store = root / f"served{workers}"
    store.mkdir()
    os.symlink(root / "cache", store / "cache")
    command = [
        *(sys.executable, "-m", "verification", "serve", "--port=0", f"--store={store}"),
        *(f"--target={options.target}", f"--devices={options.devices}"),
        f"--workers_per_device={workers}",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        found = re.search(r"http://\S+", process.stdout.readline() if process.stdout else "")
        if found is None:
            raise RuntimeError("the server did not start; its own message is on stderr")
        yield found[0]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)


if __name__ == "__main__":
    main()
