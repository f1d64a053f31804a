"""Progress, read from the store: Beam's local runner reports nothing until it ends."""

from __future__ import annotations

import sys
import threading
from typing import Any, Self

from tqdm import tqdm

from pipelines.options import RunConfig
from runtime.store import Store

KINDS = {
    "candidates": "composed",
    "admissions": "screened",
    "verdicts": "verdicts",
    "trajectories": "trajectories",
}
"""Kinds of finished work, in the order of the stages, and the word for each."""


class Progress:
    """Counts finished files in a thread: a live line on a terminal, one line a minute elsewhere."""

    def __init__(self, config: RunConfig) -> None:
        self._store = Store(config.store_root)
        self._live = sys.stderr.isatty()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()

    def line(self) -> str:
        return ", ".join(f"{self._store.count(kind)} {word}" for kind, word in KINDS.items())

    def _watch(self) -> None:
        with tqdm(bar_format="  [{elapsed}] {desc}", disable=not self._live, leave=False) as bar:
            while not self._stop.wait(1.0 if self._live else 60.0):
                bar.set_description_str(self.line())
                if not self._live:
                    print(f"  {self.line()}", file=sys.stderr, flush=True)
