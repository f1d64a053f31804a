"""A verdict as text for people: what was decided, on what evidence, in which surroundings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from schemas.records import Check, Interval, Measurement, Problem, Verdict, VerdictStatus
from verification.folder import SolutionFolder

MAX_REASON_LINES, MAX_FOREIGN = 40, 8
CORRECT, REFUSED, UNREADABLE, UNDECIDED = 0, 1, 2, 3
"""Exit codes; UNDECIDED: unmeasured, a problem that is refused, or a failure of our side."""


def exit_code(verdict: Verdict) -> int:
    """The exit code for a verdict."""
    if verdict.status is VerdictStatus.CORRECT:
        return CORRECT
    undecided = (VerdictStatus.UNMEASURED, VerdictStatus.REFERENCE_ERROR)
    return UNDECIDED if verdict.status in undecided else REFUSED


def describe_verdict(verdict: Verdict, problem: Problem, found: SolutionFolder) -> str:
    """Everything in the verdict that a reader can use, one topic a paragraph."""
    paragraphs = [
        _head(verdict, problem, found),
        _checks(verdict.checks),
        _times(verdict),
        _surroundings(verdict),
    ]
    return printable("\n\n".join("\n".join(lines) for lines in paragraphs if lines))


def printable(text: str) -> str:
    """Text a terminal shows and does not obey: a solution writes its own error messages."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def _head(verdict: Verdict, problem: Problem, found: SolutionFolder) -> list[str]:
    decided = {
        VerdictStatus.CORRECT: "correct",
        VerdictStatus.UNMEASURED: "unmeasured (every check passed, no valid time)",
        VerdictStatus.REFERENCE_ERROR: "undecided (our side failed)",
    }.get(verdict.status, f"refused: {verdict.status}")
    solution, count = found.solution, len(found.solution.files)
    lines = [f"verdict    {decided}", *_reason(verdict.reason)]
    lines.append(
        f"problem    {problem.problem_id}, {problem.precision}, {problem.target}; "
        f"effort {verdict.effort}"
    )
    lines.append(f"solution   {solution.solution_id}, {solution.form}, files: {count}")
    if found.ignored:
        shown = ", ".join(found.ignored[:8]) + (", …" if len(found.ignored) > 8 else "")
        lines.append(f"ignored    {shown}")
    if verdict.labels:
        lines.append(f"labels     {', '.join(verdict.labels)}")
    return lines


def _reason(reason: str) -> Iterator[str]:
    lines = reason.strip().splitlines()
    for index, line in enumerate(lines[:MAX_REASON_LINES]):
        yield f"{'reason' if index == 0 else '':<10} {line}"
    if len(lines) > MAX_REASON_LINES:
        yield f"{'':<10} … {len(lines) - MAX_REASON_LINES} more lines, in --json"


def _checks(checks: tuple[Check, ...]) -> list[str]:
    if not checks:
        return []
    rows = [("check", "distribution", "", "error", "budget", "")]
    for check in checks:
        error = "-" if check.error is None else f"{check.error:.2g}"
        budget = "-" if check.budget is None else f"{check.budget:.2g}"
        passed = "passed" if check.passed else "FAILED"
        rows.append((check.name, check.distribution, passed, error, budget, check.detail))
    return _table(rows)


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _times(verdict: Verdict) -> list[str]:
    if verdict.solution is None:
        return []
    rows = [
        ("time", "median", "range of samples", "times as long as the solution, 95 % interval"),
        ("solution", *_measured(verdict.solution), ""),
        ("eager", *_measured(verdict.eager), _ratio(verdict.speedup_eager)),
        ("torch.compile", *_measured(verdict.compile), _ratio(verdict.speedup_compile)),
    ]
    lines = _table(rows)
    lines.append(f"compile against itself: {_ratio(verdict.aa_control)}, expected 1")
    if verdict.roofline_ms is not None:
        share = verdict.roofline_ms / verdict.solution.median_ms
        lines.append(
            f"roofline: {verdict.roofline_ms:.4g} ms for the bytes and operations that it needs "
            f"here; the solution reaches {share:.0%} of that rate"
        )
    return lines


def _measured(measurement: Measurement | None) -> tuple[str, str]:
    if measurement is None:
        return "-", "-"
    low, high = min(measurement.samples_ms), max(measurement.samples_ms)
    count = len(measurement.samples_ms)
    return f"{measurement.median_ms:.4g} ms", f"{low:.4g} to {high:.4g} ms, {count} calls"


def _ratio(interval: Interval | None) -> str:
    if interval is None:
        return "-"
    return f"{interval.point:.3f} ({interval.low:.3f} to {interval.high:.3f})"


def _surroundings(verdict: Verdict) -> list[str]:
    environment = verdict.environment
    lines = [_isolation(verdict), *_own_work(verdict)]
    if verdict.build_s is not None:
        built = "from the cache" if verdict.build_s == 0 else f"in {verdict.build_s:.2f} s"
        lines.append(f"build      {built}, binary {verdict.binary_hash}")
    lines.append(f"harness    {verdict.harness}")
    where = (environment.device, f"{environment.num_threads} threads", environment.compiler)
    lines.append(f"device     {', '.join(where)}")
    versions = (f"torch {environment.torch}", f"Python {environment.python}", environment.platform)
    lines.append(f"versions   {', '.join(versions)}")
    return lines


def _isolation(verdict: Verdict) -> str:
    isolation = verdict.isolation
    if isolation is None:
        return "isolation  the solution was not started"
    if isolation.full:
        return f"isolation  full: {', '.join(f.name for f in dataclasses.fields(isolation))}"
    return f"isolation  not full, missing: {', '.join(isolation.missing)}"


def _own_work(verdict: Verdict) -> list[str]:
    """Whose kernels ran, and what the device was like meanwhile."""
    lines = []
    if (work := verdict.attribution) is not None:
        parts = [
            f"{value:.0%} of the time" if name == "own_share" else f"{value} {name}"
            for name, value in (
                ("dead in the second build", work.knocked_out),
                ("own launches", work.own_launches),
                ("own_share", work.own_share),
            )
            if value is not None
        ]
        lines.append(f"own work   {', '.join(parts) or 'nothing can tell'}")
        if work.foreign:
            lines.append(f"foreign    {', '.join(work.foreign[:MAX_FOREIGN])}")
    if (state := verdict.device_state) is not None:
        clock = "-" if state.sm_clock_mhz is None else f"{state.sm_clock_mhz:.0f} MHz"
        reasons = ", ".join(state.throttle_reasons) or "not throttled"
        lines.append(f"clocks     {clock}, {reasons}, rounds left out: {state.discarded_rounds}")
    return lines
