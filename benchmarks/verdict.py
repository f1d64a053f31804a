"""Where the time of screening and of a rollout goes, call by call.

    python -m benchmarks.verdict --target=cuda --num_problems=6

One process, one problem after the other. Prints seconds per call of the reference's and the
solution's workers, per problem and in all, and the share of wall time that held the device
exclusively. With --json=FILE the raw numbers, with commit and device, go there.
"""

from __future__ import annotations

import argparse
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

Costs = dict[str, list[float]]


class TimedWorker(sandbox.Worker):
    """A worker that notes how long each call takes."""

    costs: ClassVar[Costs] = defaultdict(list)

    def call(self, method: str, timeout_s: float, **params: Any) -> Any:
        started = time.perf_counter()
        try:
            reply = super().call(method, timeout_s, **params)
        finally:
            self.costs[method].append(time.perf_counter() - started)
        if method == "screen":
            for rule, seconds in reply["seconds"].items():
                self.costs[f"screen.{rule}"].append(seconds)
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
    target = Target(args.target)
    started = time.time()
    with tempfile.TemporaryDirectory() as root:
        machine = Machine(
            MachineSettings(
                target=target,
                device="cpu" if target is Target.CPU else "cuda:0",
                store=os.path.join(root, "store"),
                cache=os.path.join(root, "cache"),
                lease_log=os.path.join(root, "lease.log"),
            )
        )
        print(
            machine.environment,
            machine.isolation,
            f"start {time.time() - started:.1f} s",
            flush=True,
        )
        rows = []
        for index in range(args.num_problems):
            try:
                problem = compose(args.seed, index, target)
            except ComposeError as error:
                print(index, "not composed:", error.reason)
                continue
            rows.append(run_problem(problem, machine))
            print(json.dumps(rows[-1]), flush=True)
        wall_s = time.time() - started
        held_s = held_seconds(os.path.join(root, "lease.log"))
        record = {
            "commit": git_commit(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
            "environment": to_json(machine.environment),
            "wall_s": wall_s,
            "exclusive_s": held_s,
            "problems": rows,
            "calls": dict(TimedWorker.costs),
        }
        machine.close()
    for method, costs in sorted(TimedWorker.costs.items(), key=lambda item: -sum(item[1])):
        print(f"{method:32s} {len(costs):5d} calls {sum(costs):9.3f} s")
    print(f"{wall_s:.1f} s in all, the device held alone for {held_s / wall_s:.0%} of it")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
