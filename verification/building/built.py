"""From a solution's text to libraries that may be loaded, and dead copies of them.

What a `load_inline` solution wants built is found out by importing it in a worker of its own, with
nothing to load yet; one that asks for nothing then is constructed and called as well. The compiler
runs in a confined worker too. What comes out is audited, and copied with its kernels dead
(`verification.building.knockout`).
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.sandbox import WorkerError, WorkerTimeout
from schemas.records import Solution
from verification.building.binary import audit
from verification.building.build import BuildError, BuildTimeout, Library, Runner, build
from verification.building.knockout import knock_out

if TYPE_CHECKING:
    from verification.machine import Machine

STEPS = 3
"""Steps' worth of time a build may take."""


FAST_MATH = re.compile(r"fast_?-?math")


@dataclass(frozen=True, kw_only=True)
class Built:
    """Libraries by the keys they are asked for, as the build left them, and dead copies."""

    parts: tuple[Library, ...]
    dead: dict[str, Path]
    """Empty where not all of them can be knocked out."""
    knocked_out: int | None
    form: str
    binary_hash: str
    build_s: float
    cached: bool
    dropped: tuple[str, ...] = ()
    """Flags that the solution asked for and did not get."""

    @property
    def labels(self) -> list[str]:
        """What a verdict should say of this build: times are without the flags left out."""
        fast = any(FAST_MATH.search(flag) for flag in self.dropped)
        return ["fast_math_left_out"] if fast else []

    @property
    def libraries(self) -> dict[str, Path]:
        return {part.key: part.path for part in self.parts}

    def refusals(self, allowed: Collection[str] = ()) -> list[str]:
        """What the libraries ask for and must not have; `allowed`: see `binary`."""
        return [
            why
            for part in self.parts
            for why in audit(part.path, part.objects, self.form, frozenset(allowed))
        ]


def assemble(
    machine: Machine, solution: Solution, allowed: Collection[str] = (), inputs_code: str = ""
) -> Built:
    """Build a solution of any form. Raises BuildError, and BuildTimeout when it takes too long.

    `inputs_code`: a problem's text without its model (`workers.inputs`), for solutions that ask
    for extensions only when they are constructed or called.
    """
    recorded = _recorded(machine, solution, inputs_code) if solution.form == "load_inline" else ()
    # What may need the lease for itself comes before `building`: a lease is not re-entrant.
    tools, _ = machine.toolchain, machine.zygote
    with (
        machine.building(),
        machine.scratch(work=False) as scratch,
        _compilers(machine, scratch) as run,
    ):
        made = build(
            solution,
            machine.target,
            tools,
            machine.builds,
            timeout_s=STEPS * machine.timeout_s,
            memory_gib=machine.limits.memory_gib,
            recorded=recorded,
            libraries=allowed,
            run=run,
            scratch=scratch,
        )
    dead: dict[str, Path] = {}
    killed = 0
    for part in made.libraries:
        with contextlib.suppress(ValueError):  # there is nothing to kill in it
            dead[part.key], count = _dead_copy(part.path)
            killed += count
    return Built(
        parts=made.libraries,
        dead=dead if len(dead) == len(made.libraries) else {},
        knocked_out=killed or None,
        form=solution.form,
        binary_hash=made.binary_hash,
        build_s=made.build_s,
        cached=made.cached,
        dropped=made.dropped,
    )


def write_files(solution: Solution, scratch: Path) -> None:
    """A solution's files where its worker can read them."""
    for source in solution.files:
        file = scratch / source.path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source.text)
        file.chmod(0o644)
        file.parent.chmod(0o755)


def _recorded(machine: Machine, solution: Solution, inputs_code: str) -> list[Any]:
    """What the solution asks to be built. Raises BuildError."""
    with machine.scratch() as scratch:
        write_files(solution, scratch)
        worker = machine.spawn(
            "verification.workers.solution_worker:handlers",
            "solution",
            scratch=str(scratch),
            log=str(scratch / "log"),
            inputs_code=inputs_code,
        )
        doing = "importing model_new.py"
        try:
            reply = machine.ask(worker, "record")
            if inputs_code and reply == {"extensions": []}:
                doing = "using model_new.py"
                machine.open(worker)
                reply = machine.ask(worker, "record", used=True)
        except WorkerTimeout as error:
            raise BuildTimeout(f"{doing}: {error}") from error
        except WorkerError as error:
            raise BuildError(f"{doing}: {error}") from error
        finally:
            machine.end(worker)
    found = reply.get("extensions") if isinstance(reply, dict) else None
    if not isinstance(found, list):
        raise BuildError(f"expected a list of extensions, got {reply!r:.200}")
    return found


@contextlib.contextmanager
def _compilers(machine: Machine, scratch: Path) -> Iterator[Runner]:
    """A confined worker that runs compilers below `scratch`; it starts with the first command."""
    workers = []

    def run(command: list[str], folder: Path, timeout_s: float) -> tuple[int, str]:
        scratch.chmod(0o777)
        worker = machine.spawn("runtime.command:handlers", "builder", view_write=[str(scratch)])
        workers.append(worker)
        try:
            reply = worker.call("run", timeout_s, command=command, cwd=str(folder))
        except WorkerTimeout as error:
            raise TimeoutError(str(error)) from error
        except WorkerError as error:
            raise BuildError(f"the compiler's process: {error}") from error
        return int(reply["code"]), str(reply["output"])

    try:
        yield run
    finally:
        for worker in workers:
            worker.close()


def _dead_copy(library: Path) -> tuple[Path, int]:
    """A copy beside a library, made anew each time: that takes milliseconds."""
    copy = library.with_name("dead.so")
    work = library.with_name(f"dead.{uuid.uuid4().hex}.tmp")
    try:
        killed = knock_out(library, work)
        os.replace(work, copy)
    finally:
        work.unlink(missing_ok=True)
    return copy, len(killed)
