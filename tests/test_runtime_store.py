"""The store shows a value whole or not at all, and loses nothing that was finished."""

from __future__ import annotations

import builtins
import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from runtime.store import Store


def test_round_trip_and_counts(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "s"))
    assert store.get("verdicts", "ab12") is None
    assert store.keys("verdicts") == []
    store.put("verdicts", "ab12", {"x": [1, None, "é"]})
    store.put("verdicts", "cd34", 2)
    assert store.get("verdicts", "ab12") == {"x": [1, None, "é"]}
    assert store.keys("verdicts") == ["ab12", "cd34"]
    assert store.count("other") == 0


def test_leftover_of_a_killed_writer_is_not_a_value(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.put("k", "ab12", 1)
    (tmp_path / "k" / "ab" / "ab99.json.123.tmp").write_text('{"half')
    assert store.keys("k") == ["ab12"]
    assert store.get("k", "ab99") is None


def test_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(str(tmp_path))
    store.put("k", "ab12", "old")

    class Full:
        def __init__(self, path: str) -> None:
            self.path = path

        def __enter__(self) -> Full:
            Path(self.path).write_bytes(b'"ha')
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def write(self, _: bytes) -> None:
            raise OSError(28, "No space left on device")

    real = builtins.open
    monkeypatch.setattr(
        builtins, "open", lambda p, mode="r", *a, **k: Full(p) if mode == "wb" else real(p, mode)
    )
    with pytest.raises(OSError, match="No space"):
        store.put("k", "ab12", "new")
    monkeypatch.undo()
    assert store.get("k", "ab12") == "old"
    assert [f.name for f in (tmp_path / "k" / "ab").iterdir()] == ["ab12.json"]


def test_not_a_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        Store(str(tmp_path)).put("k", "ab12", float("nan"))


def test_a_filesystem_that_is_not_a_disk() -> None:
    store = Store("memory://ops6k-test")
    store.put("k", "ab12", [1])
    assert store.get("k", "ab12") == [1]
    assert store.keys("k") == ["ab12"]


def _write(root: str, value: Any) -> None:
    for _ in range(50):
        Store(root).put("k", "ab12", value)


def test_concurrent_writers_of_one_key(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    values = [["a"] * 2000, ["b"] * 2000]
    writers = [context.Process(target=_write, args=(str(tmp_path), v)) for v in values]
    for writer in writers:
        writer.start()
    seen = set()
    while any(w.is_alive() for w in writers):
        found = Store(str(tmp_path)).get("k", "ab12")
        seen.add(json.dumps(found))
    assert seen <= {"null", *(json.dumps(v) for v in values)}
    assert Store(str(tmp_path)).get("k", "ab12") in values
