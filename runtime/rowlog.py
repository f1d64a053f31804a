"""Logs that many processes append rows to: cells separated by tabs, a line per row.

Whoever writes may be killed and a disk may fill up, so a line need not be whole: readers pass over
one that is not what they expect.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any


def append(file: str, *cells: str | float) -> None:
    """Add a row; seconds with six digits."""
    texts = (cell if isinstance(cell, str) else f"{cell:.6f}" for cell in cells)
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(handle, ("\t".join(texts) + "\n").encode())  # one short write does not interleave
    finally:
        os.close(handle)


def rows(file: str, *kinds: type) -> Iterator[tuple[Any, ...]]:
    """The rows with one cell of each kind; none without a file."""
    with contextlib.suppress(FileNotFoundError), open(file) as lines:
        for line in lines:
            cells = line.rstrip("\n").split("\t")
            if line.endswith("\n") and len(cells) == len(kinds):
                with contextlib.suppress(ValueError):  # two lines that have run together
                    yield tuple(kind(cell) for kind, cell in zip(kinds, cells, strict=True))
