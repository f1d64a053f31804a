"""Each room imports only from the rooms above it, and package inits are empty."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ABOVE: dict[str, set[str]] = {
    "schemas": set(),
    "runtime": {"schemas"},
    "operator_templates": {"schemas", "runtime"},
    "dedup": {"schemas", "runtime"},
    "verification": {"schemas", "runtime"},
    "training_export": {"schemas", "runtime"},
    "kernel_agent": {"schemas", "runtime", "verification"},
    "pipelines": {
        "schemas", "runtime", "operator_templates", "dedup", "verification", "training_export",
        "kernel_agent",
    },
}  # fmt: skip
SCHEMA_LIBRARIES = {"pyarrow"}


def imports_of(file: Path) -> set[str]:
    """Top-level names a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("room", ABOVE)
def test_a_room_imports_only_from_above(room: str) -> None:
    for file in sorted((ROOT / room).rglob("*.py")):
        ours = imports_of(file) & (set(ABOVE) | {"tests", "benchmarks"})
        assert ours <= ABOVE[room] | {room}, f"{file}: {sorted(ours - ABOVE[room] - {room})}"


def test_only_pipelines_know_beam() -> None:
    for room in set(ABOVE) - {"pipelines"}:
        for file in (ROOT / room).rglob("*.py"):
            assert "apache_beam" not in imports_of(file), file


def test_schemas_need_no_torch() -> None:
    import sys

    for file in (ROOT / "schemas").glob("*.py"):
        foreign = imports_of(file) - sys.stdlib_module_names - {"schemas"} - SCHEMA_LIBRARIES
        assert not foreign, f"{file}: {foreign}"


@pytest.mark.parametrize("room", ABOVE)
def test_package_inits_are_empty(room: str) -> None:
    for file in (ROOT / room).rglob("__init__.py"):
        assert file.read_text() == "", file


def test_a_new_room_has_a_layer() -> None:
    rooms = {file.parent.name for file in ROOT.glob("*/__init__.py")}
    assert rooms - {"tests", "benchmarks"} == set(ABOVE)
