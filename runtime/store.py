"""Finished work as content-addressed JSON files: one mechanism for resume, retry and progress.

A file is `ROOT/KIND/ab/KEY.json`, where KEY hashes everything the work depends on. It is written
under a name of its own and renamed, so a reader sees all or nothing, and two processes that do
the same work at once (generations overlap for a moment after a kill -9) do not disturb each other.
"""

from __future__ import annotations

import json
import os
import uuid
from typing import Any

import fsspec


class Store:
    """JSON values under (kind, key) on any filesystem fsspec reaches."""

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/")
        self._fs, self._path = fsspec.core.url_to_fs(self.root)
        self._local = "file" in self._fs.protocol

    def _file(self, kind: str, key: str) -> str:
        return f"{self._path}/{kind}/{key[:2]}/{key}.json"

    def get(self, kind: str, key: str) -> Any | None:
        """The stored value, or None when there is none."""
        try:
            return json.loads(self._fs.cat_file(self._file(kind, key)))
        except FileNotFoundError:
            return None

    def put(self, kind: str, key: str, value: Any) -> None:
        """Store a JSON value. On a local disk it is synced before it becomes visible.

        Raises OSError when the disk is full; the unfinished file is removed and nothing is visible.
        """
        path = self._file(kind, key)
        data = json.dumps(value, sort_keys=True, allow_nan=False).encode()
        if not self._local:
            self._fs.pipe_file(path, data)  # an object store shows an object whole or not at all
            return
        os.makedirs(os.path.dirname(path), exist_ok=True)
        temporary = f"{path}.{uuid.uuid4().hex}.tmp"
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            if os.path.exists(temporary):
                os.unlink(temporary)
            raise

    def keys(self, kind: str) -> list[str]:
        """Every finished key of a kind, sorted. Leftovers of killed writers do not count."""
        if not self._fs.isdir(f"{self._path}/{kind}"):
            return []
        self._fs.invalidate_cache()
        files = self._fs.find(f"{self._path}/{kind}")
        return sorted(f.rsplit("/", 1)[1][: -len(".json")] for f in files if f.endswith(".json"))

    def count(self, kind: str) -> int:
        return len(self.keys(kind))
