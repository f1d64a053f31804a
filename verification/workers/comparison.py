"""What a solution handed over against what was expected: number, description, values.

`correctness` judges the values of one output. What is found is told as JSON: {passed, error,
budget, detail, guard}.
"""

from __future__ import annotations

from typing import Any

import torch

from verification.guards import Guard
from verification.workers.correctness import Expected, compare
from verification.workers.transport import Mailbox, describe


def compare_outputs(
    got: tuple[str, list[dict[str, Any]]],
    wanted: tuple[str, list[Expected]],
    mail: Mailbox,
    off: set[Guard],
) -> dict[str, Any]:
    """The first output that is refused, else the one with the largest error.

    `got` has the structure and descriptions that a solution gives, its values are in the mail.
    `off`: guards that are not asked.
    """
    (structure, outputs), (expected_structure, expected) = got, wanted
    loose = Guard.STRUCTURE in off
    if structure != expected_structure and not loose:
        return _failed(f"expected {expected_structure}, got {structure}")
    if len(outputs) != len(expected) and not loose:
        return _failed(f"expected {len(expected)} outputs, got {len(outputs)}")
    worst: dict[str, Any] | None = None
    for index, (description, output) in enumerate(zip(outputs, expected, strict=not loose)):
        found = _compare_one(index, description, output, mail, off)
        if not found["passed"]:
            return found
        if worst is None or (found["error"] or 0.0) > (worst["error"] or 0.0):
            worst = found
    return worst if worst is not None else _failed("nothing was handed over")


def _compare_one(
    index: int, description: Any, output: Expected, mail: Mailbox, off: set[Guard]
) -> dict[str, Any]:
    like, problem = _described(description, output.eager, off)
    if problem is not None:
        return problem | {"detail": f"output {index}: {problem['detail']}"}
    try:
        value = mail.take(index, like).to(output.eager.dtype)
    except (ValueError, OSError) as error:  # anything else is our own fault
        return _failed(f"output {index}: {error}")
    found = compare(value, output, off)
    return {
        "passed": found.passed,
        "error": found.error,
        "budget": found.budget,
        "detail": f"output {index}: {found.detail}" if found.detail else "",
        "guard": str(found.guard),
    }


def _described(
    got: Any, wanted: torch.Tensor, off: set[Guard]
) -> tuple[torch.Tensor, dict[str, Any] | None]:
    """A tensor like the one that was handed over, and what is wrong about its description."""
    expected = describe(wanted)
    if not isinstance(got, dict):
        return wanted, _failed(f"expected {expected}, got {got!r:.200}")
    for keys, guard in ((("shape", "dtype"), Guard.STRUCTURE), (("contiguous",), Guard.STRIDES)):
        # A solution may be contiguous where the reference is not.
        same = all(got.get(k) == expected[k] or (k == "contiguous" and got.get(k)) for k in keys)
        if not same and guard not in off:
            return wanted, _failed(f"expected {expected}, got {got!r:.200}", guard)
    dtype = getattr(torch, str(got.get("dtype")), None)
    if Guard.STRUCTURE in off and isinstance(dtype, torch.dtype):
        return torch.empty_like(wanted, dtype=dtype), None
    return wanted, None


def _failed(detail: str, guard: Guard = Guard.STRUCTURE) -> dict[str, Any]:
    return {
        "passed": False,
        "error": None,
        "budget": None,
        "detail": detail,
        "guard": str(guard),
    }
