"""What this machine gives a run, and what to do about what it does not.

    python -m pipelines.doctor

Prints a table; the exit code is 0 when foreign code can be isolated fully, else 1.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.sandbox import Limits, Zygote
from runtime.view import ROOT
from schemas.codec import from_json
from schemas.records import Isolation, Target
from verification.building.toolchain import ToolchainError, toolchain
from verification.machine import SHM, SHM_BYTES_NEEDED
from verification.sampling import Sampler
from verification.workers.attribution import find_cuda_home

TRIALS = {"filesystem": ("view", "landlock"), "syscalls": ("seccomp",), "limits": ("user",)}
"""Which of `runtime.means.Means` a part of an Isolation rests on, where the names differ."""
ADVICE = {
    "network": "run as root, or allow user namespaces (sysctl kernel.unprivileged_userns_clone=1; "
    "on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0)",
    "user": "run as root, with a Python that other users may read",
    "limits": "run as root: then a worker's processes are counted apart from ours",
    "processes": "run as root; in a container give it CAP_SYS_ADMIN (docker run --cap-add "
    "SYS_ADMIN --security-opt seccomp=unconfined --security-opt apparmor=unconfined)",
    "filesystem": "run as root on Linux 5.12 or newer, or on a kernel that has Landlock "
    "(CONFIG_SECURITY_LANDLOCK, lsm=landlock,...)",
    "syscalls": "use a kernel with seccomp filters, on x86-64 or aarch64",
}
TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    name: str
    good: bool | None
    """None: it is not there, and not everybody needs it."""
    found: str
    todo: str = ""


def isolation_rows(isolation: Isolation, why_not: dict[str, str]) -> Iterator[Row]:
    """One row for each part, with the reason the kernel gave where one is missing."""
    for part, advice in ADVICE.items():
        if part not in isolation.missing:
            yield Row(name=part, good=True, found="taken away")
            continue
        reasons = [why_not[trial] for trial in TRIALS.get(part, (part,)) if trial in why_not]
        found = "; ".join(reasons) or "not taken away"
        yield Row(name=part, good=False, found=found, todo=advice)


def compiler_rows() -> Iterator[Row]:
    """The compilers of both targets, as a run would choose them."""
    for target in Target:
        try:
            version = toolchain(target).version
        except ToolchainError as error:
            good = False if target is Target.CPU else None
            yield Row(name=f"--target={target}", good=good, found=str(error))
        else:
            yield Row(name=f"--target={target}", good=True, found=version)


def gpu_rows(smi: Callable[[], str] | None = None) -> Iterator[Row]:
    """Each GPU with its driver, as nvidia-smi tells, and whether a worker can open it.

    A worker starts no programs, so it cannot have the driver's device files made.
    """
    try:
        lines = (smi or _nvidia_smi)().strip().splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        yield Row(name="GPU", good=None, found=f"none: {error}")
        return
    for line in lines:
        yield Row(name="GPU", good=True, found=line)
    if lines and not Path("/dev/nvidia-uvm").exists():
        yield Row(
            name="/dev/nvidia-uvm",
            good=False,
            found="missing",
            todo="run `nvidia-modprobe -u -c=0` or any CUDA program once",
        )


def _nvidia_smi() -> str:
    query = "--query-gpu=name,driver_version,memory.total"
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def cupti_row(home: Path) -> Row:
    """CUPTI, which tells whose kernels ran."""
    headers = (home / "include" / "cupti.h").exists()
    libraries = sorted(home.glob("lib*/libcupti.so*")) + sorted(
        home.glob("extras/CUPTI/lib*/libcupti.so*")
    )
    if headers and libraries:
        return Row(name="CUPTI", good=True, found=str(libraries[0]))
    lacks = "header and library" if not headers and not libraries else "library" if headers else ""
    found = f"no {lacks or 'header'} below {home}"
    todo = "for --target=cuda install the CUDA toolkit with CUPTI, or set $CUDA_HOME"
    return Row(name="CUPTI", good=None, found=found, todo=todo)


def sampling_row(refused: str) -> Row:
    """Sampling a process from outside, which tells whose work was done where the CPU is timed."""
    name = "perf_event_open"
    if not refused:
        return Row(name=name, good=True, found="a worker can be sampled")
    todo = "for --target=cpu run as root, or set sysctl kernel.perf_event_paranoid=1 or lower"
    return Row(name=name, good=None, found=refused, todo=todo)


def memory_row(folder: Path, needed_bytes: int = SHM_BYTES_NEEDED) -> Row:
    """Whether outputs can be handed over in memory."""
    if not os.access(folder, os.W_OK):
        return Row(name=str(folder), good=False, found="cannot be written", todo="mount a tmpfs")
    free = shutil.disk_usage(folder).free
    todo = f"docker run --shm-size={needed_bytes >> 30}g: outputs go by the disk until then"
    good = free >= needed_bytes
    found = f"{free / 2**30:.1f} GiB free"
    return Row(name=str(folder), good=good, found=found, todo="" if good else todo)


def arithmetic_row(flushes_subnormals: bool) -> Row:
    """Floating point of a worker: IEEE, unless a library it loads was built with -ffast-math."""
    if not flushes_subnormals:
        return Row(name="floating point", good=True, found="keeps subnormal numbers")
    return Row(
        name="floating point",
        good=False,
        found="subnormal numbers are flushed to zero",
        todo="find the library built with -ffast-math that a worker loads (LD_LIBRARY_PATH)",
    )


def table(rows: list[Row]) -> str:
    """The rows as text, what is to be done below."""
    signs = {True: "yes", False: "NO", None: "-"}
    width = max(len(row.name) for row in rows)
    text = []
    for row in rows:
        found = re.sub(r"\s+", " ", row.found)[:160]
        text.append(f"{row.name:<{width}}  {signs[row.good]:<3}  {found}")
        if row.todo and row.good is not True:
            text.append(f"{'':<{width}}       -> {row.todo}")
    return "\n".join(text)


def handlers(config: dict[str, Any], isolation: dict[str, bool]) -> dict[str, Callable[..., Any]]:
    """The entry point of the worker that is looked at."""
    smallest = sys.float_info.min
    return {
        "look": lambda: {
            "isolation": isolation,
            "why_not": config["why_not"],
            "flushes_subnormals": smallest / 2 == 0.0,
        }
    }


def look() -> dict[str, Any]:
    """What a solution's worker says of itself. Raises ParentGone, WorkerError."""
    zygote = Zygote.start(warm=False)
    try:
        worker = zygote.spawn("pipelines.doctor:handlers", {}, Limits(), "solution")
        with Sampler(worker.pid) as sampler:
            seen = worker.call("look", TIMEOUT_S)
        return seen | {"unsampled": sampler.refused}
    finally:
        zygote.close()


def main() -> int:
    seen = look()
    isolation = from_json(Isolation, seen["isolation"])
    rows = [
        *isolation_rows(isolation, seen["why_not"]),
        *compiler_rows(),
        *gpu_rows(),
        cupti_row(find_cuda_home()),
        sampling_row(seen["unsampled"]),
        memory_row(SHM),
        arithmetic_row(seen["flushes_subnormals"]),
    ]
    print(f"{ROOT}\n{table(rows)}\n")
    if isolation.full:
        print("Foreign code is isolated fully: verdicts made here can be published.")
        return 0
    print(
        f"Foreign code is not isolated fully here, missing: {', '.join(isolation.missing)}. "
        "Verdicts say so, and are published only if partial isolation is allowed."
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
