"""Rows of a run, and what they come to: accepted, refused by guard, claimed against measured."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.published.records import Expect, Published
from benchmarks.published.running import Answer
from schemas.records import VerdictStatus
from verification.guards import Guard

DIGITS = 4
MAX_REASON = 300
GAINED = 1.05
"""Times eager, from which on a trick that was let through has gained something."""
NO_FORM, PROBLEM_REFUSED, UNREADABLE, FAILED = "no_form", "problem_refused", "unreadable", "failed"
OTHER_PARAMETERS = "other_parameters"
"""Its parameters have other names than the problem's, and are not what its constructor draws from
the same seed."""
UNDECIDED = (
    NO_FORM, PROBLEM_REFUSED, UNREADABLE, FAILED, OTHER_PARAMETERS,
    str(VerdictStatus.REFERENCE_ERROR),
)  # fmt: skip
STATUSES = tuple(dict.fromkeys([*map(str, VerdictStatus), *UNDECIDED]))
"""What a row can end as."""
RETRIED = (FAILED, str(VerdictStatus.REFERENCE_ERROR))
"""Rows of an earlier run that say nothing about a kernel."""
PASSED = (str(VerdictStatus.CORRECT), str(VerdictStatus.UNMEASURED))
OWN = (str(Guard.DISPATCH_AUDIT), str(Guard.ATTRIBUTION))

Row = dict[str, Any]


def row_of(suite: str, published: Published, answer: Answer) -> Row:
    """A kernel's row; nothing of its text is in it."""
    row: Row = {
        "suite": suite,
        "name": published.name,
        "claimed": published.claimed,
        "expect": str(published.expect),
        "off": [str(guard) for guard in published.off],
        "libraries": list(published.libraries),
        "form": published.form,
        "precision": str(published.precision),
        **{key: answer.get(key) for key in ("problem_id", "solution_id", "doubt", "seconds")},
    }
    verdict = answer.get("verdict")
    if verdict is None:
        status, reason = _no_verdict(published, answer)
        return {**row, "status": status, "reason": reason, "guard": None}
    return {**row, **_of_verdict(verdict)}


def _no_verdict(published: Published, answer: Answer) -> tuple[str, str]:
    if published.why_not:
        return NO_FORM, published.why_not
    for key, status in (("refused", PROBLEM_REFUSED), ("unreadable", UNREADABLE)):
        if key in answer:
            return status, str(answer[key])[:MAX_REASON]
    return FAILED, str(answer.get("error"))[:MAX_REASON]


def _of_verdict(verdict: dict[str, Any]) -> Row:
    work = verdict["attribution"] or {}
    reason = verdict["reason"]
    other = "NoCounterpart: " in reason or "loading state_dict for ModelNew" in reason
    return {
        "status": OTHER_PARAMETERS if other else verdict["status"],
        "reason": _errors_only(reason) if verdict["status"] == "build_error" else
        reason[:MAX_REASON],
        "guard": guard_of(reason),
        "labels": verdict["labels"],
        "effort": verdict["effort"],
        "harness": verdict["harness"],
        "build_s": verdict["build_s"],
        **{key: _interval(verdict[key]) for key in ("speedup_eager", "speedup_compile")},
        "aa_control": _interval(verdict["aa_control"]),
        "ms": {
            side: round(verdict[side]["median_ms"], DIGITS)
            for side in ("solution", "eager", "compile") if verdict[side]
        },
        "checks": len(verdict["checks"]),
        "own_share": work.get("own_share"),
        "own_launches": work.get("own_launches"),
        "knocked_out": work.get("knocked_out"),
        "foreign": [name[:120] for name in (work.get("foreign") or [])[:8]],
    }  # fmt: skip


def _errors_only(output: str) -> str:
    """A compiler's error lines: what it quotes is the kernel's text, which stays where it is."""
    lines = [line.strip() for line in output.splitlines() if re.search(r"error\b|Error\b", line)]
    return " | ".join(lines[:3] or output.splitlines()[-1:])[:MAX_REASON]


def guard_of(reason: str) -> str | None:
    """A reason begins with the guard a solution fell to, where it fell to one."""
    first = reason.partition(":")[0].strip()
    return first if first in list(Guard) else None


def _interval(ratio: dict[str, float] | None) -> list[float] | None:
    """[low, point, high]"""
    return None if ratio is None else [round(ratio[k], DIGITS) for k in ("low", "point", "high")]


def rightly(row: Row) -> bool | None:
    """Whether a decision is what it has to be; None where that is not known beforehand."""
    expect, status = row["expect"], row["status"]
    if expect == Expect.NOTHING or status in UNDECIDED:
        return None
    passed = status in PASSED
    if expect == Expect.HONEST:
        return passed
    if expect == Expect.TORCH:
        return passed or (not row["off"] and row["guard"] in OWN)
    if expect == Expect.EXPLOIT and row["off"] and passed:
        return not (row["speedup_eager"] and row["speedup_eager"][0] > GAINED)
    # Refused, or right but without a speed that anybody would be paid for.
    return not passed if expect == Expect.WRONG else status != VerdictStatus.CORRECT


def group_of(row: Row) -> str:
    """What a row counts as."""
    if row["status"] in PASSED or row["status"] in UNDECIDED:
        return str(row["status"])
    return f"refused: {row['guard'] or row['status']}"


def geomean(values: Sequence[float]) -> float | None:
    logs = [math.log(value) for value in values if value > 0]
    return math.exp(sum(logs) / len(logs)) if logs else None


def table(rows: Sequence[Row], reviews: Mapping[str, Mapping[str, str]] | None = None) -> str:
    """Everything a reader wants of the rows, as text."""
    parts = [_lines(rows), _counts("decided", rows, group_of), _speeds(rows)]
    parts += [_rightly(rows)] if any(rightly(row) is not None for row in rows) else []
    if reviews is not None:
        parts.append(_reviewed(rows, reviews))
    harnesses = {row["harness"].split("-")[0] for row in rows if row.get("harness")}
    if len(harnesses) > 1:
        parts.append(f"rows of {len(harnesses)} versions of the verifier: {sorted(harnesses)}")
    return "\n\n".join(parts)


def _lines(rows: Sequence[Row]) -> str:
    width = max((len(row["name"]) for row in rows), default=4)
    lines = [f"{'name'.ljust(width)}  claimed  over eager              over compile  decided"]
    for row in rows:
        claimed = "-" if row["claimed"] is None else f"{row['claimed']:.2f}"
        eager, compiled = row.get("speedup_eager"), row.get("speedup_compile")
        measured = f"{eager[1]:.2f} [{eager[0]:.2f}, {eager[2]:.2f}]" if eager else "-"
        beside = f"{compiled[1]:.2f}" if compiled else "-"
        why = row["reason"].replace("\n", " ")[:90]
        doubt = f" (doubt: {row['doubt'].partition(':')[0]})" if row.get("doubt") else ""
        lines.append(
            f"{row['name'].ljust(width)}  {claimed:>7}  {measured:22}  {beside:>12}  "
            f"{row['status']}{doubt} {why}".rstrip()
        )
    return "\n".join(lines)


def _counts(title: str, rows: Sequence[Row], key: Callable[[Row], str]) -> str:
    counts = Counter(map(key, rows))
    lines = [f"{title}, of {len(rows)}:"]
    return "\n".join([*lines, *(f"  {count:4}  {name}" for name, count in counts.most_common())])


def _speeds(rows: Sequence[Row]) -> str:
    both = [row for row in rows if row.get("speedup_eager")]
    said = [row for row in both if row["claimed"]]
    lines = []
    if said:
        claimed, measured = (geomean([row["claimed"] for row in said]),
                             geomean([row["speedup_eager"][1] for row in said]))  # fmt: skip
        lines.append(
            f"accepted with a claim: {len(said)}, geomean claimed {claimed:.2f}x, "
            f"measured {measured:.2f}x over eager"
        )
    if both:
        eager = geomean([row["speedup_eager"][1] for row in both])
        compiled = geomean([row["speedup_compile"][1] for row in both])
        faster = [sum(row[f"speedup_{side}"][0] > 1 for row in both) for side in SIDES]
        lines.append(
            f"accepted and timed: {len(both)}, geomean {eager:.2f}x over eager (faster: "
            f"{faster[0]}), {compiled:.2f}x over torch.compile (faster: {faster[1]})"
        )
    refused = [r["claimed"] for r in rows if group_of(r).startswith("refused") and r["claimed"]]
    if refused:
        lines.append(f"refused with a claim: {len(refused)}, geomean {geomean(refused):.2f}x")
    return "\n".join(lines) or "nothing was timed"


SIDES = ("eager", "compile")


def _rightly(rows: Sequence[Row]) -> str:
    known = [(row, right) for row in rows if (right := rightly(row)) is not None]
    lines = []
    for title, off in (("all guards on", False), ("audits off", True)):
        mine = [(row, right) for row, right in known if bool(row["off"]) is off]
        if mine:
            lines.append(f"decided rightly, {title}: {sum(r for _, r in mine)} of {len(mine)}")
    wrong = [f"  wrongly: {row['name']}: {group_of(row)}" for row, right in known if not right]
    unknown = [r["name"] for r in rows if r["expect"] != Expect.NOTHING and rightly(r) is None]
    lines += [f"not decided: {len(unknown)}: {', '.join(unknown)}"] if unknown else []
    return "\n".join([*lines, *wrong])


def _reviewed(rows: Sequence[Row], reviews: Mapping[str, Mapping[str, str]]) -> str:
    """What reading the refused ones by hand came to."""
    refused = [row for row in rows if row["status"] not in PASSED]
    read: dict[str, list[str]] = defaultdict(list)
    for row in refused:
        if row["name"] in reviews:
            read[reviews[row["name"]]["class"]].append(row["name"])
    lines = [f"not accepted: {len(refused)}, read by hand: {sum(map(len, read.values()))}"]
    lines += [f"  {len(names):4}  {name}: {', '.join(names)}" for name, names in read.items()]
    unread = [f"{r['name']} ({group_of(r)})" for r in refused if r["name"] not in reviews]
    return "\n".join([*lines, *([f"not yet read: {', '.join(unread)}"] if unread else [])])
