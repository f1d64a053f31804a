"""Choices that change how a plan is printed, not what it computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Params:
    """One variant of a plan. `why` says in a sentence what should move, and why."""

    name: str
    why: str
    options: Mapping[str, int] = field(default_factory=dict)

    def get(self, option: str, default: int) -> int:
        return self.options.get(option, default)


PLAIN = Params(name="plain", why="the printer's defaults")
