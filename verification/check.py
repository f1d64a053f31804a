"""`python -m verification check`: one problem, one solution, a verdict for people.

prepare   screen the problem; a doubt about it is told, and few doubts end the matter
judge     the same verdict that the pipeline and the trainer get
report    everything that was measured, as text (verification.report)
"""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from schemas.codec import to_json
from schemas.records import Admission, Precision, Problem, Solution, Target, Verdict
from verification.admission import is_meaningless, prepare
from verification.folder import SolutionFolder, read_problem, read_solution
from verification.judge import Judge
from verification.machine import Machine, MachineSettings
from verification.policy import Policy
from verification.report import UNDECIDED, describe_verdict, exit_code, printable


class ProblemRefused(Exception):
    """A verdict on this problem would say nothing; the message says why."""

    def __init__(self, admission: Admission, why: str) -> None:
        super().__init__(f"the problem is refused: {why}")
        self.admission = admission


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A verdict and what screening said about its problem."""

    admission: Admission
    verdict: Verdict


def doubt(admission: Admission) -> str | None:
    """What screening holds against a problem, or None."""
    return None if admission.reason is None else f"{admission.reason}: {admission.detail}"


def open_judge(
    problem: Problem, machine: Machine, accept_problem: bool, policy: Policy | None = None
) -> tuple[Judge, Admission]:
    """A judge for somebody's own problem. Raises ProblemRefused.

    `accept_problem`: judge even where screening finds that a verdict says nothing.
    """
    admission = prepare(problem, machine)
    if is_meaningless(admission) and not accept_problem:
        raise ProblemRefused(admission, doubt(admission) or "")
    try:
        with warnings.catch_warnings():  # of its text's, such as invalid escape sequences
            warnings.simplefilter("ignore")
            return Judge(problem, admission, machine, policy), admission
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        # The judge takes the problem's text apart without running it.
        why = doubt(admission) or f"its text cannot be parsed: {type(error).__name__}: {error}"
        raise ProblemRefused(admission, why) from error


def judge_once(
    problem: Problem,
    solution: Solution,
    machine: Machine,
    effort: str,
    accept_problem: bool = False,
    policy: Policy | None = None,
) -> Judged:
    """Screen and judge, once. Raises ProblemRefused, and what `Judge.verify` raises."""
    judge, admission = open_judge(problem, machine, accept_problem, policy)
    with judge:
        return Judged(admission=admission, verdict=judge.verify(solution, effort))


def check(options: Namespace) -> int:
    """Carry out the command: read, judge, print. Raises FolderError for unreadable input."""
    target = Target(options.target)
    problem = read_problem(options.problem, target, Precision(options.precision))
    found = read_solution(options.solution, options.form)
    with _machine(options, target) as machine:
        try:
            judged = judge_once(
                problem,
                found.solution,
                machine,
                options.effort,
                options.accept_problem,
                Policy(
                    libraries=frozenset(options.libraries),
                    partial_isolation=options.partial_isolation,
                ),
            )
        except ProblemRefused as refusal:
            _write_json(options.json, UNDECIDED, problem, found, refusal.admission, None)
            print(printable(f"{refusal}\n--accept_problem judges all the same"))
            return UNDECIDED
    code = exit_code(judged.verdict)
    _write_json(options.json, code, problem, found, judged.admission, judged.verdict)
    if (against := doubt(judged.admission)) is not None:
        print(printable(f"the problem itself is doubtful: {against}\n"))
    print(describe_verdict(judged.verdict, problem, found))
    return code


@contextmanager
def _machine(options: Namespace, target: Target) -> Iterator[Machine]:
    """The machine, with everything it keeps below one folder."""
    root = Path(options.store).expanduser()
    root.mkdir(parents=True, exist_ok=True)
    # Not the whole folder: what was built and compiled before is still right.
    store = tempfile.mkdtemp(dir=root, prefix="fresh-") if options.fresh else str(root)
    machine = Machine(
        MachineSettings(
            target=target,
            device=options.device or ("cpu" if target is Target.CPU else "cuda:0"),
            store=store,
            cache=str(root / "cache"),
            memory_limit_gib=options.memory_limit_gib,
            device_memory_gib=options.device_memory_gib,
            problem_timeout_s=options.problem_timeout_s,
        )
    )
    try:
        yield machine
    finally:
        machine.close()
        if options.fresh:
            shutil.rmtree(store, ignore_errors=True)


def _write_json(
    path: str | None,
    code: int,
    problem: Problem,
    found: SolutionFolder,
    admission: Admission,
    verdict: Verdict | None,
) -> None:
    if path is None:
        return
    record = {
        "exit_code": code,
        "problem_id": problem.problem_id,
        "precision": problem.precision,
        "form": found.solution.form,
        "ignored": found.ignored,
        "admission": admission,
        "verdict": verdict,
    }
    Path(path).write_text(json.dumps(to_json(record), indent=1) + "\n")
