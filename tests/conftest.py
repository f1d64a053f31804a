"""Shared by all tests: one warm machine per run, because starting it takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from schemas.records import Target
from verification.machine import Machine, MachineSettings


@pytest.fixture(scope="session")
def cpu_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    root = tmp_path_factory.mktemp("machine")
    machine = Machine(
        MachineSettings(
            target=Target.CPU,
            device="cpu",
            store=str(root / "store"),
            cache=str(root / "cache"),
            problem_timeout_s=60.0,
            memory_limit_gib=6.0,
            lease_log=str(root / "lease.log"),
        )
    )
    yield machine
    machine.close()
