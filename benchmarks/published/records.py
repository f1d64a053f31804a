"""What is run: kernels that others published, as records; and why a copy cannot be read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from schemas.codec import content_key
from schemas.records import Precision, Solution, Target
from verification.folder import MODEL
from verification.guards import Guard


class PublishedError(Exception):
    """A copy or a flag that cannot be used, in one line."""


class Expect(StrEnum):
    """What is known of a kernel beforehand."""

    NOTHING = "nothing"
    HONEST = "honest"
    TORCH = "torch"
    """Right, with no kernel of its own: refused for that, and for nothing else."""
    WRONG = "wrong"
    """Wrong, and meant to be."""
    EXPLOIT = "exploit"


AUDITS = (Guard.ATTRIBUTION, Guard.DISPATCH_AUDIT)
"""Off in a second run of what is written with torch, to see what else catches it."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """A kernel somebody published, with the problem it is for."""

    name: str
    """In its suite."""
    problem_code: str = ""
    of: tuple[int, str] | None = None
    """Level and name of the problem in KernelBench, where it is one of those."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Of the solution, as path and text."""
    form: str = "load_inline"
    why_not: str = ""
    """Why it has no form that can be judged; then nothing else is looked at."""
    claimed: float | None = None
    """Speedup over eager, as its authors say."""
    expect: Expect = Expect.NOTHING
    precision: Precision = Precision.FP32
    libraries: tuple[str, ...] = ()
    off: tuple[Guard, ...] = ()

    @property
    def solution(self) -> Solution:
        return Solution.of(dict(self.files), self.form)


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A repository of kernels. `marker`: a path that a copy of it has."""

    url: str
    marker: str
    read: Callable[[Path, Target], Iterator[Published]]
    accept_problem: bool = False
    """Judge though a trivial answer passes: a trick is a trick there too."""


def copy_of(suite: Suite, given: str) -> Path:
    """The folder of a copy. Raises PublishedError when it is none."""
    root = Path(given).expanduser()
    if not (root / suite.marker).exists():
        raise PublishedError(
            f"expected --peer_dir to be a copy of {suite.url} with {suite.marker}, got {given!r}"
        )
    return root


def text_of(file: Path) -> str:
    """Raises PublishedError."""
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise PublishedError(f"{file}: expected a readable text, got {error}") from error


def one_file(code: str) -> dict[str, str]:
    return {MODEL: code}


def digest(published: Sequence[Published]) -> str:
    """A hash of everything that is judged: which version of a copy was run."""
    return content_key(*[(p.name, p.problem_code, dict(p.files), p.why_not) for p in published])


_LIBRARIES = {
    "cublas": re.compile(r"matmul|\bmm\(|bmm|einsum|Linear|linear\(|LSTM|GRU|RNN|[\w)] @ [\w(]"),
    "cudnn": re.compile(r"[Cc]onv(_?[Tt]ranspose)?\dd"),
}


def needed_libraries(problem_code: str) -> tuple[str, ...]:
    """NVIDIA's libraries for what it asks: "cublas" for products, "cudnn" for convolutions."""
    return tuple(name for name, word in _LIBRARIES.items() if word.search(problem_code))
