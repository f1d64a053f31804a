"""The output folder: whose it is, and whether this run may continue in it.

A marker, `.ops6k`, says what is being made there. It is written before any work, so that a folder
without one is somebody else's, and a folder with one is continued by the same command only.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import fsspec

from pipelines.options import STORE, RunConfig, UsageError
from runtime.store import Store
from schemas.codec import content_key
from schemas.records import SCHEMA_VERSION, Target
from training_export.shards import atomic_file, begin

MARKER = ".ops6k"
COMMAND = ("python", "-m", "pipelines.ops6k")


def identity(config: RunConfig, target: Target) -> dict[str, Any]:
    """The settings that decide what ends up in the folder."""
    return {
        "schema_version": SCHEMA_VERSION,
        "target": str(target),
        "policy": config.policy,
        "seed": config.seed,
        "near_misses": config.near_misses,
        "sft": config.sft,
        "problem_timeout_s": config.problem_timeout_s,
        "memory_limit_gib": config.memory_limit_gib,
        "device_memory_gib": config.device_memory_gib,
        "num_problems": config.num_problems,
    }


def claim(config: RunConfig, target: Target) -> bool:
    """Mark the folder as this run's; True when it continues an earlier run.

    `num_problems` may grow: candidates are numbered, so the earlier ones are found in the store.
    Raises UsageError when the folder holds something else, another run, or cannot be written.
    """
    continues = check(config, target)
    attempts = read(config)["attempts"] if continues else []
    attempts.append({"started": time.time(), "command": [*COMMAND, *sys.argv[1:]]})
    marker = {"settings": identity(config, target), "attempts": attempts}
    _try_store(config)
    try:
        with atomic_file(f"{config.output}/{MARKER}") as file:
            file.write((json.dumps(marker, indent=2) + "\n").encode())
        begin(config.output)
    except OSError as error:
        raise UsageError(f"--output={config.output} cannot be written: {error}") from error
    Store(config.store_root).put("runs", content_key(marker["settings"]), marker["settings"])
    return continues


def _try_store(config: RunConfig) -> None:
    """Write to the store before anything else is touched."""
    try:
        Store(config.store_root).put("runs", content_key("written"), True)
    except (OSError, ImportError, ValueError) as error:
        raise UsageError(f"--store={config.store_root} cannot be written: {error}") from error


def read(config: RunConfig) -> dict[str, Any]:
    """The marker: the settings of the run, and when and how each attempt at it was started."""
    try:
        with fsspec.open(f"{config.output}/{MARKER}", "r") as file:
            found = dict(json.load(file))
        return {"settings": dict(found["settings"]), "attempts": list(found["attempts"])}
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"--output={config.output}: its marker {MARKER} is not one of ours ({error}): "
            "name another folder"
        ) from error


def check(config: RunConfig, target: Target) -> bool:
    """`claim` without writing: what `--dry_run` does."""
    try:
        filesystem, root = fsspec.core.url_to_fs(config.output.rstrip("/"))
    except (ImportError, ValueError) as error:  # no driver installed, unknown protocol
        raise UsageError(f"--output={config.output}: {error}") from error
    try:
        return _check_folder(config, target, filesystem, root)
    except OSError as error:
        raise UsageError(f"--output={config.output} cannot be read: {error}") from error


def _check_folder(config: RunConfig, target: Target, filesystem: Any, root: str) -> bool:
    if not filesystem.exists(root):
        return False
    if not filesystem.isdir(root):
        raise UsageError(f"--output={config.output} is a file, expected a folder")
    if not filesystem.exists(f"{root}/{MARKER}"):
        names = sorted(entry.rstrip("/").rsplit("/", 1)[-1] for entry in filesystem.ls(root, False))
        names = [name for name in names if not _left_by_a_claim(name)]
        if names:
            raise UsageError(
                f"--output={config.output} holds something else ({', '.join(names[:3])}"
                f"{', ...' if len(names) > 3 else ''}): name a new or empty folder"
            )
        return False
    _check_same(config.output, read(config)["settings"], identity(config, target))
    return True


def _left_by_a_claim(name: str) -> bool:
    """What a run that was killed before it had written its marker leaves."""
    return name == STORE or name.startswith(f".{MARKER}.")


def _check_same(output: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    if old.get("schema_version") != new["schema_version"]:
        raise UsageError(
            f"--output={output} has schema version {old.get('schema_version')}, this is version "
            f"{new['schema_version']}: name another folder"
        )
    changed = [name for name in new if name != "num_problems" and old.get(name) != new[name]]
    if changed:
        what = ", ".join(f"{name}={old.get(name)} (now {new[name]})" for name in changed)
        raise UsageError(f"--output={output} holds a run with {what}: name another folder")
    if old.get("num_problems", 0) > new["num_problems"]:
        raise UsageError(
            f"--output={output} holds a run of {old['num_problems']} problems, and "
            f"--num_problems may only grow (now {new['num_problems']}): name another folder"
        )
