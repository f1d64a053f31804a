"""Shared by all tests: one warm machine per run, because starting it takes seconds, and one
export."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import factories
from tests.export_flow import Flow, export, make_flow
from verification.machine import Machine


@pytest.fixture(scope="session")
def cpu_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    root = tmp_path_factory.mktemp("machine")
    changes = {"problem_timeout_s": 60.0, "memory_limit_gib": 6.0}
    machine = Machine(factories.machine_settings(root, **changes))
    yield machine
    machine.close()


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Flow, dict[str, Any]]:
    root = tmp_path_factory.mktemp("export")
    flow = make_flow()
    return root, flow, export(root, flow, {"trajectories": 3, "problems": 2})
