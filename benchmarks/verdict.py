"""Where the time of screening and of a rollout goes, call by call.

    python -m benchmarks.verdict --target=cuda --num_problems=6

One process, one problem after the other, until all are done or Ctrl-C. Prints seconds per call of
the reference's and the solution's workers, and the share of wall time that held the device
exclusively. With --json=FILE the raw numbers, with commit and device, go there: every call in
order, so that gaps (builds, forks) show too. On a GPU two workers are at work at once in places;
there the solution's seconds hold what it waits for the reference.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from collections import defaultdict
from typing import Any, ClassVar

from dedup.signature import signature
from kernel_agent.policies import policy_named
from kernel_agent.rollout import rollout
from operator_templates.catalogue.registry import all_templates
from operator_templates.compose import ComposeError, compose
from runtime import sandbox
from runtime.lease import held_seconds
from schemas.codec import from_json, to_json
from schemas.records import Problem, Target, Trajectory
from training_export.run_record import git_commit
from verification.admission import admit
from verification.machine import Machine, MachineSettings


class TimedWorker(sandbox.Worker):
    """A worker that notes when each call began and how long it took."""

    calls: ClassVar[list[tuple[str, float, float]]] = []

    def send(self, method: str, **params: Any) -> None:
        self._sent = method, time.perf_counter()
        super().send(method, **params)

    def receive(self, timeout_s: float, spin_s: float = 0.0) -> Any:
        method, started = self._sent
        try:
            reply = super().receive(timeout_s, spin_s)
        finally:
            self.calls.append((method, started, time.perf_counter() - started))
        if method == "screen":
            now = time.perf_counter()
            self.calls.extend((f"screen.{rule}", now, s) for rule, s in reply["seconds"].items())
        return reply


def run_problem(problem: Problem, machine: Machine) -> dict[str, Any]:
    """Screen and roll out one problem; how long each took and what came out."""
    started = time.perf_counter()
    declared = [call for op in problem.ops for call in all_templates()[op].canonical]
    admission = admit(problem, machine, signature, declared)
    row: dict[str, Any] = {
        "ops": list(problem.ops),
        "precision": str(problem.precision),
        "reason": admission.reason and str(admission.reason),
        "eager_ms": admission.eager_ms,
        "compile_ms": admission.compile_ms,
        "headroom": admission.headroom,
        "screen_s": time.perf_counter() - started,
    }
    if admission.reason is not None:
        return row | {"detail": admission.detail}
    started = time.perf_counter()
    keys = rollout(problem, admission, policy_named("expert", machine), machine)
    row["rollout_s"] = time.perf_counter() - started
    for kind, key in keys.items():
        made = from_json(Trajectory, machine.store.get("trajectories", key))
        verdict = made.verdict
        row[str(kind)] = {
            "stop": str(made.stop_reason),
            "detail": made.detail,
            "turns": len(made.turns),
            "refused": [
                f"{t.verdict.status}: {t.verdict.reason}"[:300]
                for t in made.turns
                if t.verdict is not None and not t.verdict.passed
            ],
            "over_eager": verdict and verdict.speedup_eager and verdict.speedup_eager.point,
            "over_compile": verdict and verdict.speedup_compile and verdict.speedup_compile.point,
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--target", choices=[str(t) for t in Target], default="cpu")
    parser.add_argument("--num_problems", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json")
    args = parser.parse_args()
    sandbox.Worker = TimedWorker  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as root:
        machine = open_machine(Target(args.target), root)
        started = time.time()
        rows: list[dict[str, Any]] = []
        with contextlib.suppress(KeyboardInterrupt):
            print(machine.environment, machine.isolation, flush=True)
            for index in range(args.num_problems):
                try:
                    problem = compose(args.seed, index, machine.target)
                except ComposeError as error:
                    print(index, "not composed:", error.reason)
                    continue
                rows.append(run_problem(problem, machine))
                print(json.dumps(rows[-1]), flush=True)
        report(machine, rows, time.time() - started, args.json)
        machine.close()


def open_machine(target: Target, root: str) -> Machine:
    return Machine(
        MachineSettings(
            target=target,
            device="cpu" if target is Target.CPU else "cuda:0",
            store=os.path.join(root, "store"),
            cache=os.path.join(root, "cache"),
            lease_log=os.path.join(root, "lease.log"),
        )
    )


def report(machine: Machine, rows: list[dict[str, Any]], wall_s: float, file: str | None) -> None:
    """Print seconds per call and write the raw numbers."""
    held_s = held_seconds(str(machine.settings.lease_log))
    costs: dict[str, list[float]] = defaultdict(list)
    for method, _, seconds in TimedWorker.calls:
        costs[method].append(seconds)
    for method, found in sorted(costs.items(), key=lambda item: -sum(item[1])):
        print(f"{method:32s} {len(found):5d} calls {sum(found):9.3f} s")
    print(f"{wall_s:.1f} s in all, the device held alone for {held_s / wall_s:.0%} of it")
    if file:
        first = min((start for _, start, _ in TimedWorker.calls), default=0.0)
        record = {
            "commit": git_commit(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
            "environment": to_json(machine.environment),
            "wall_s": wall_s,
            "exclusive_s": held_s,
            "problems": rows,
            "calls": [(m, round(t - first, 4), round(s, 4)) for m, t, s in TimedWorker.calls],
        }
        with open(file, "w") as out:
            json.dump(record, out)


if __name__ == "__main__":
    main()
