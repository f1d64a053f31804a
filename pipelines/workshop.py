"""What a worker process keeps between elements: the store and the machine, opened on first use."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pipelines.options import RunConfig
from runtime.store import Store
from schemas.records import Target
from verification.machine import Machine, MachineSettings, start_zygote

ZYGOTE = "OPS6K_ZYGOTE"


@functools.cache
def store(config: RunConfig) -> Store:
    return Store(config.store_root)


@functools.cache
def machine(config: RunConfig) -> Machine:
    """This process's machine; its warm parent ends with the process."""
    opened = Machine(
        MachineSettings(
            target=Target(config.target),
            device=device(config),
            store=config.store_root,
            cache=cache_folder(config),
            memory_limit_gib=config.memory_limit_gib,
            device_memory_gib=config.device_memory_gib,
            problem_timeout_s=config.problem_timeout_s,
            lease_log=local_path(config, "lease.log"),
            zygote=os.environ.get(ZYGOTE),
        )
    )
    atexit.register(opened.close)
    # An interpreter ends by collecting all it has imported: a second, and Beam ends its workers
    # one after the other.
    atexit.register(gc.freeze)
    return opened


def cache_folder(config: RunConfig) -> str:
    """Where built libraries and compiled baselines are; always on a local disk."""
    return local_path(config, "cache") or os.path.join(tempfile.gettempdir(), "ops6k-cache")


@contextlib.contextmanager
def shared_zygote(config: RunConfig) -> Iterator[None]:
    """One warm parent for every worker process of this machine, while a run lasts.

    It warms up while Beam starts its workers; its address travels in the environment they inherit.
    """
    zygote = start_zygote(Path(cache_folder(config)), Target(config.target))
    os.environ[ZYGOTE] = zygote.address
    try:
        yield
    finally:
        del os.environ[ZYGOTE]
        zygote.close()


def device(config: RunConfig) -> str:
    """The device this worker measures on: workers are dealt out over the GPUs by Beam's number."""
    if config.target == Target.CPU:
        return "cpu"
    import torch  # here, because the driver needs this module and not torch

    number = re.search(r"(\d+)$", os.environ.get("WORKER_ID", "0"))
    return f"cuda:{int(number.group(1) if number else 0) % torch.cuda.device_count()}"


def local_path(config: RunConfig, name: str) -> str | None:
    """A path beside a store on a local disk; None when the store is elsewhere."""
    if "://" in config.store_root:
        return None
    os.makedirs(config.store_root, exist_ok=True)
    return os.path.join(config.store_root, name)
