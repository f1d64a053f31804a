"""Building a solution: one ninja graph per solution, all cores, a cache keyed by content and
toolchain.

The library is always made from the text by us; nothing a solution brings along is loaded. Not
covered yet: the compiler itself runs outside the sandbox, so `#include` can read what we can
read.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from ninja import BIN_DIR

from schemas.codec import content_key
from schemas.records import Solution, Target
from verification.toolchain import Toolchain

LIBRARY = "solution.so"


class BuildError(Exception):
    """The compiler refused; the message is its output."""


class BuildTimeout(BuildError):
    """It took too long."""


@dataclass(frozen=True, kw_only=True)
class Build:
    """A built library, its hash and what building it took (0 when it came from the cache)."""

    library: Path
    binary_hash: str
    build_s: float
    cached: bool


def build(
    solution: Solution,
    target: Target,
    toolchain: Toolchain,
    cache: Path,
    timeout_s: float,
    memory_gib: float,
) -> Build:
    """Compile and link everything under `kernels/` into one shared library.

    Raises BuildTimeout after `timeout_s`, else BuildError with the compiler's output; `memory_gib`
    is the address space each of its processes may have. Safe under concurrent use: a build happens
    in a folder of its own, which is renamed into place when it is whole, and nothing that is in
    place is ever removed.
    """
    sources = {f.path: f.text for f in solution.files if f.path.startswith("kernels/")}
    compiled = [path for path in sources if path.endswith(toolchain.suffixes)]
    if not compiled:
        raise BuildError(f"expected kernels/*{toolchain.suffixes[0]}, got {sorted(sources)}")
    key = content_key(sources, target, toolchain)
    final = cache / key
    if not (final / LIBRARY).exists():
        return _build_into(final, sources, compiled, toolchain, timeout_s, memory_gib)
    return Build(library=final / LIBRARY, binary_hash=_hash(final), build_s=0.0, cached=True)


def _build_into(
    final: Path,
    sources: dict[str, str],
    compiled: list[str],
    toolchain: Toolchain,
    timeout_s: float,
    memory_gib: float,
) -> Build:
    work = final.with_name(f"{final.name}.{uuid.uuid4().hex}.tmp")
    try:
        for path, text in sources.items():
            file = work / _safe(path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        (work / "build.ninja").write_text(_graph(compiled, toolchain))
        started = time.perf_counter()
        _run_ninja(work, timeout_s, memory_gib)
        build_s = time.perf_counter() - started
        try:
            os.rename(work, final)
        except OSError:  # it is there: from another process, or emptied by somebody
            if not (final / LIBRARY).exists():
                os.replace(work / LIBRARY, final / LIBRARY)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return Build(library=final / LIBRARY, binary_hash=_hash(final), build_s=build_s, cached=False)


def _graph(compiled: list[str], toolchain: Toolchain) -> str:
    lines = [
        f"rule compile\n  command = {toolchain.compile_command} -c $in -o $out",
        f"rule link\n  command = {toolchain.link_command}",
    ]
    objects = []
    for path in sorted(compiled):
        objects.append(f"{path}.o")
        lines.append(f"build {path}.o: compile {path}")
    lines.append(f"build {LIBRARY}: link {' '.join(objects)}")
    return "\n".join(lines) + "\n"


def _run_ninja(work: Path, timeout_s: float, memory_gib: float) -> None:
    # A shell, because Python code between fork and exec can hang in a process with threads.
    limited = f'ulimit -v {int(memory_gib * 2**20)} && exec "$0" "$@"'
    ninja = [str(Path(BIN_DIR) / "ninja"), "-C", str(work), "--quiet"]
    command = ["sh", "-c", limited, *ninja]
    done = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that a compiler that hangs ends with ninja
    )
    try:
        output, _ = done.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        os.killpg(done.pid, signal.SIGKILL)
        done.communicate()
        raise BuildTimeout(f"the build took over {timeout_s:g} s") from error
    if done.returncode != 0:
        raise BuildError(output.replace(f"{work}/", "")[-8000:])


def _safe(path: str) -> Path:
    relative = Path(path)
    if relative.is_absolute() or ".." in relative.parts or any(c in path for c in " $:\n"):
        raise BuildError(f"expected a plain path below kernels/, got {path!r}")
    return relative


def _hash(folder: Path) -> str:
    return hashlib.sha256((folder / LIBRARY).read_bytes()).hexdigest()[:16]
