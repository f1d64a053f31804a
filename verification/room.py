"""A GPU's memory is shared: who has run out of it may have had too little left, not asked for too
much."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PAUSES_S = (5.0, 10.0)
"""Before a device that was full is asked again."""
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE = rf"([\d.]+) ({'|'.join(_UNITS)})"
_SAID = re.compile(rf"Tried to allocate {_SIZE}\..* of which {_SIZE} is free", re.DOTALL)


class NoRoom(RuntimeError):
    """The device was full whenever it was asked, which says nothing about a problem."""


def was_full(message: str) -> bool:
    """Whether the device had less left than was asked for, by torch's words.

    Else a process has reached its own limit, and will again. True when nothing is said of it:
    what a kernel allocates itself has no limit of its own.
    """
    said = _SAID.search(message)
    if said is None:
        return True
    asked, left = (float(said[i]) * _UNITS[said[i + 1]] for i in (1, 3))
    return asked > left


def with_room(
    measure: Callable[[], T], no_room: Callable[[T], bool], pauses_s: tuple[float, ...]
) -> T:
    """Measure, and after each pause again as long as there was no room.

    Not covered: neighbours that keep the memory through all the pauses.
    """
    for pause_s in pauses_s:
        result = measure()
        if not no_room(result):
            return result
        time.sleep(pause_s)
    return measure()
