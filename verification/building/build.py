"""Building a solution: one ninja graph for all its libraries, all cores, a bounded cache.

Libraries are always made from the text by us; nothing a solution brings along is loaded. What is
built for which form says `plans`. The cache is keyed by content and toolchain. Of extensions that
include torch's headers each object has a key of its own, so that only the files that changed are
compiled again.

Not covered here: what the compiler can read. The step that runs ninja is a parameter; give one that
runs it in a confined worker, because the default runs it as we are, and `#include` then reads what
we can read.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ninja import BIN_DIR

from schemas.codec import content_key
from schemas.records import Solution, Target
from verification.building.build_cache import LIMIT_BYTES, BuildCache
from verification.building.plans import LIGHT, ExtensionPlan, Kind, extensions
from verification.building.recorded import FormError
from verification.building.toolchain import Toolchain

LIBRARY = "solution.so"
OBJECT = "object.o"
MESSAGE_CHARACTERS = 8000
# Errors that a larger header may heal.
MISSING = re.compile(
    r"not a member of|has no member|not been declared|was not declared|is undefined"
    r"|does not name a type|incomplete type|must be a class or namespace|No such file"
)
PLAIN_INCLUDE = re.compile(r"\s*#\s*include\s*([<\"])[\w./+-]+[>\"]\s*(//[^\\]*)?")

Runner = Callable[[list[str], Path, float], tuple[int, str]]
"""(command, folder to run it in, seconds) -> (exit code, its output). Raises TimeoutError."""


class BuildError(Exception):
    """The compiler refused; the message is its output. Or the solution is not of its form."""


class BuildTimeout(BuildError):
    """It took too long."""


@dataclass(frozen=True, kw_only=True)
class Library:
    """A built library. `key` is how the worker asks for it, `objects` what it was linked from."""

    key: str
    path: Path
    binary_hash: str
    objects: tuple[Path, ...]


@dataclass(frozen=True, kw_only=True)
class Build:
    """Built libraries, their hash and what building took (0 when all came from the cache).

    `dropped`: the compiler flags a solution asked for and did not get.
    """

    libraries: tuple[Library, ...]
    build_s: float
    cached: bool
    dropped: tuple[str, ...] = ()

    @property
    def library(self) -> Path:
        """The first library; of a `cabi` solution the only one."""
        return self.libraries[0].path

    @property
    def binary_hash(self) -> str:
        """Of its library, or of all their hashes."""
        hashes = [library.binary_hash for library in self.libraries]
        return hashes[0] if len(hashes) == 1 else _digest("".join(hashes).encode())


def build(
    solution: Solution,
    target: Target,
    toolchain: Toolchain,
    cache: Path,
    timeout_s: float,
    memory_gib: float,
    *,
    recorded: Any = (),
    fast_math: bool = False,
    libraries: Collection[str] = (),
    run: Runner | None = None,
    scratch: Path | None = None,
    limit_bytes: int = LIMIT_BYTES,
) -> Build:
    """Compile and link a solution's libraries.

    Raises BuildTimeout after `timeout_s`, else BuildError with the compiler's output. `memory_gib`:
    the address space each process of the default `run` may have. `recorded`, `fast_math`,
    `libraries`: see `plans.extensions`. `scratch`: where to make the folder to compile
    in, writable for everybody, when `run` is another user; else in the cache. `limit_bytes`: what
    the cache may hold. Safe under concurrent use.
    """
    try:
        plans = extensions(solution, target, toolchain, recorded, fast_math, libraries)
    except FormError as error:
        raise BuildError(str(error)) from error
    workshop = _Workshop(
        toolchain=toolchain,
        cache=BuildCache(cache, limit_bytes),
        scratch=scratch,
        run=run or _here(memory_gib),
    )
    entries = {plan.key: workshop.cache.find(workshop.key(plan), LIBRARY) for plan in plans}
    missing = [plan for plan in plans if entries[plan.key] is None]
    started = time.perf_counter()
    made = workshop.make(missing, timeout_s) if missing else {}
    build_s = time.perf_counter() - started if missing else 0.0
    found = {key: entry for key, entry in entries.items() if entry is not None} | made
    return Build(
        libraries=tuple(_library(plan, found[plan.key]) for plan in plans),
        build_s=build_s,
        cached=not missing,
        dropped=tuple(dict.fromkeys(flag for plan in plans for flag in plan.dropped)),
    )


def _library(plan: ExtensionPlan, entry: Path) -> Library:
    path = entry / LIBRARY
    return Library(
        key=plan.key,
        path=path,
        binary_hash=_digest(path.read_bytes()),
        objects=tuple(sorted((entry / "objects").rglob("*.o"))),
    )


@dataclass(frozen=True, kw_only=True)
class _Workshop:
    """Everything a build needs besides its plans."""

    toolchain: Toolchain
    cache: BuildCache
    scratch: Path | None
    run: Runner

    def key(self, plan: ExtensionPlan) -> str:
        plain = plan.kind is Kind.SHARED
        return content_key(plan, self.toolchain.commands() if plain else self.toolchain)

    def make(self, plans: list[ExtensionPlan], timeout_s: float) -> dict[str, Path]:
        """Build into the cache; the entries by the plans' keys. Raises BuildError."""
        deadline = time.monotonic() + timeout_s
        try:
            return self._attempt(plans, any(plan.light for plan in plans), deadline, timeout_s)
        except BuildTimeout:
            raise
        except BuildError as error:
            if not any(plan.light for plan in plans) or not MISSING.search(str(error)):
                raise
        return self._attempt(plans, False, deadline, timeout_s)

    def _attempt(
        self, plans: list[ExtensionPlan], light: bool, deadline: float, timeout_s: float
    ) -> dict[str, Path]:
        with self._work() as work:
            jobs = [
                _Job(plan=plan, folder=work / f"e{index}", toolchain=self.toolchain, light=light)
                for index, plan in enumerate(plans)
            ]
            for job in jobs:
                job.write(self.cache)
            if self.scratch is not None:
                _open_to_all(work)
            (work / "build.ninja").write_text(_graph(jobs))
            ninja = [str(Path(BIN_DIR) / "ninja"), "--quiet"]
            try:
                code, output = self.run(ninja, work, max(0.01, deadline - time.monotonic()))
            except TimeoutError as error:
                raise BuildTimeout(f"the build took over {timeout_s:g} s") from error
            if code != 0:
                raise BuildError(_readable(output, work))
            return {job.plan.key: job.adopt(self.cache, self.key(job.plan)) for job in jobs}

    @contextlib.contextmanager
    def _work(self) -> Iterator[Path]:
        work = (self.scratch or self.cache.root) / f"build.{uuid.uuid4().hex}.tmp"
        try:
            work.mkdir()
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class _Job:
    """One library being built in a folder of its own."""

    plan: ExtensionPlan
    folder: Path
    toolchain: Toolchain
    light: bool

    @property
    def _files(self) -> dict[str, str]:
        return {**self.plan.sources, **(self.plan.light if self.light else {})}

    def write(self, cache: BuildCache) -> None:
        """Write the sources, and objects that are known already."""
        for path, text in self._files.items():
            file = self.folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(text.encode("utf-8", "replace"))
        if self.plan.kind is Kind.TORCH_EXTENSION:
            for path in self.plan.compiled:
                entry = cache.find(self._object_key(path), OBJECT)
                if entry is not None:
                    shutil.copyfile(entry / OBJECT, self.folder / f"{path}.o")

    def _object_key(self, path: str) -> str:
        """Of everything the compiler may see: headers, and other sources where it could."""
        files = self._files
        others = set(self.plan.compiled) - {path}
        names = [Path(other).name for other in others]
        tricky = any(_may_include(text, names) for text in files.values())
        seen = {name: text for name, text in files.items() if tricky or name not in others}
        return content_key(OBJECT, path, self._compile(path), seen, self.toolchain.version)

    def _compile(self, path: str) -> str:
        plan, torch = self.plan, self.toolchain.torch
        if plan.kind is Kind.SHARED:
            return f"{self.toolchain.compile_command} -c {path} -o {path}.o"
        device = path.endswith(".cu")
        command = torch.compile_cu if device else torch.compile_cpp
        flags = " ".join(plan.cuda_flags if device else plan.cpp_flags)
        light = f" -I{LIGHT}" if self.light else ""
        return f"{command}{light} {flags} -c {path} -o {path}.o"

    def edges(self) -> Iterator[str]:
        """Of a ninja graph with the rule `run`."""
        name, objects = self.folder.name, [f"{path}.o" for path in self.plan.compiled]
        for path in self.plan.compiled:
            if not (self.folder / f"{path}.o").exists():
                yield _edge(name, f"{path}.o", [path], self._compile(path))
        shared = self.plan.kind is Kind.SHARED
        link = self.toolchain.link_command if shared else self.toolchain.torch.link_command
        link = link.replace("$in", " ".join(objects)).replace("$out", LIBRARY)
        link += "".join(f" -l{library}" for library in self.plan.libraries)
        yield _edge(name, LIBRARY, objects, link)

    def adopt(self, cache: BuildCache, key: str) -> Path:
        """Take over what was built. Raises BuildError when it is not there as a plain file."""
        objects = {path: self.folder / f"{path}.o" for path in self.plan.compiled}
        try:
            if self.plan.kind is Kind.TORCH_EXTENSION:
                for path, built in objects.items():
                    cache.keep(self._object_key(path), {OBJECT: built}, OBJECT)
            named = {f"objects/{path}.o": built for path, built in objects.items()}
            return cache.keep(key, {**named, LIBRARY: self.folder / LIBRARY}, LIBRARY)
        except (OSError, ValueError) as error:
            raise BuildError(f"the build left no library that can be used: {error}") from error


def _may_include(text: str, names: list[str]) -> bool:
    """Whether a source could pull in a file of one of these names, as far as its text tells."""
    for line in text.replace("\\\n", "").splitlines():
        if "incbin" in line or "embed" in line or any(name in line for name in names):
            return True
        if "include" in line and not PLAIN_INCLUDE.fullmatch(line):
            return True
    return False


def _edge(folder: str, output: str, inputs: list[str], command: str) -> str:
    listed = " ".join(f"{folder}/{path}" for path in inputs)
    escaped = command.replace("$", "$$")
    return f"build {folder}/{output}: run {listed}\n  command_line = {escaped}\n  dir = {folder}"


def _graph(jobs: list[_Job]) -> str:
    rule = "rule run\n  command = cd $dir && $command_line"
    return "\n".join([rule, *(edge for job in jobs for edge in job.edges())]) + "\n"


def _here(memory_gib: float) -> Runner:
    """Run a command as we are, with a limit on the address space of each process."""

    def run(command: list[str], folder: Path, timeout_s: float) -> tuple[int, str]:
        # A shell, because Python code between fork and exec can hang in a process with threads.
        limited = f'ulimit -v {int(memory_gib * 2**20)} && exec "$0" "$@"'
        done = subprocess.Popen(
            ["sh", "-c", limited, *command],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # so that a compiler that hangs ends with ninja
        )
        try:
            output, _ = done.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            os.killpg(done.pid, signal.SIGKILL)
            done.communicate()
            raise TimeoutError(str(error)) from error
        return done.returncode, output

    return run


def _readable(output: str, work: Path) -> str:
    """A compiler's words without our folders and without the command line, which is mostly ours."""
    lines = output.replace(f"{work}/", "").splitlines()
    kept = [line for line in lines if not re.match(r"cd e\d+ && |ninja: ", line)]
    text = "\n".join(re.sub(r"^FAILED: (\[code=\d+\] )?e\d+/", "FAILED: ", line) for line in kept)
    return text[-MESSAGE_CHARACTERS:] or "the build failed and said nothing"


def _open_to_all(work: Path) -> None:
    for folder in (work, *(path for path in work.rglob("*") if path.is_dir())):
        folder.chmod(0o777)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
