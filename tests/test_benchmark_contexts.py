"""Counting contexts, with processes that only say they made one."""

from __future__ import annotations

import pytest

from benchmarks import contexts

SAYS = "import sys, time; sys.stdin.readline(); print(0.25, flush=True); time.sleep(60)"


def test_processes_are_started_again_until_time_is_over() -> None:
    found = contexts.measure(SAYS, {}, together=2, seconds=0.5)
    assert found["make_ms"] == 250.0
    assert found["end_ms"] < 5000
    assert len(found["samples_ms"]) >= 2
    assert found["a_minute"] > 0
    assert f"{found['a_minute']:.1f}" in contexts.table([{"variant": "fake", **found}])


def test_a_process_that_makes_none_is_said() -> None:
    with pytest.raises(RuntimeError, match="could make no context"):
        contexts.measure("import sys; sys.exit(1)", {}, together=1, seconds=0.1)
