"""What the list of mixed solutions is made of: entries, in groups that share a problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from schemas.records import Problem, Solution, Verdict
from verification.machine import Machine

FAST, SLOW, WRONG, EXPLOIT = "fast", "slow", "wrong", "exploit"
KINDS = (FAST, SLOW, WRONG, EXPLOIT)
"""What an entry is meant to be: honest and fused, honest and not faster or hardly, a mutant, a
trick. What comes of it is for the verdicts to say."""
COMPOSED_SLOTS = (
    ("plain", FAST), ("mutant 1", WRONG), ("trick", EXPLOIT), ("reference", SLOW),
    ("mutant 2", WRONG), ("variant", FAST), ("slowed", SLOW), ("mutant 3", WRONG),
)  # fmt: skip
Verify = Callable[[Solution], Verdict]


class Skip(Exception):
    """This entry cannot be made, and why."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One solution of the list. `id` says where it comes from."""

    id: str
    kind: str
    make: Callable[[], Solution] | None = field(default=None, compare=False)
    """None where its group needs a machine for it."""


class Group(Protocol):
    """Solutions of one problem, judged one after the other."""

    @property
    def key(self) -> str: ...
    @property
    def entries(self) -> tuple[Entry, ...]: ...
    @property
    def insists(self) -> bool:
        """Whether the problem is judged even where screening refuses it."""

    def open(self, machine: Machine) -> Problem:
        """The problem. Raises Skip."""

    def solution(self, entry: Entry, verify: Verify) -> Solution:
        """Of an open group; `verify` gives verdicts of effort `reward`. Raises Skip."""

    def describe(self, entry: Entry) -> dict[str, Any]:
        """What the entry is, as JSON values: "what" by name, and more where there is more."""


def marked(made: Solution, mark: str) -> Solution:
    """With a comment in model_new.py, so that no two entries are the same text and no verdict on
    one is recalled for another."""
    files = {source.path: source.text for source in made.files}
    files["model_new.py"] += f"\n# {mark}\n"
    return Solution.of(files, made.form)
