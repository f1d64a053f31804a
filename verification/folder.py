"""A problem file and a solution folder as somebody hands them over: records, or one clear line.

Nothing is run or imported here, so a file may hold anything. Links are never followed inside a
folder, only plain files are opened, and everything is counted before it is read. What a folder
holds besides `model_new.py` and sources below `kernels/` is left aside and named.

Not covered: hard links, which look like any other file.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import NoReturn

from schemas.codec import content_id
from schemas.records import Precision, Problem, Solution, Target

MAX_FILE_BYTES = 2 << 20
MAX_FILES = 64
MAX_TOTAL_BYTES = 8 << 20
MAX_NAMES = 4096
"""Names looked at in a folder, those left aside included."""
MAX_DEPTH = 8
SOURCES = (".cu", ".cuh", ".cpp", ".cc", ".cxx", ".c", ".h", ".hpp", ".inl")
FORMS = ("cabi", "load_inline", "paper")
MODEL = "model_new.py"

MAX_PATH = 200
SHOWN = 200
"""Characters of a path or of what was found that an error shows."""

_PATH = re.compile(r"model_new\.py|kernels(?:/[A-Za-z0-9_][A-Za-z0-9_.-]*)+")
_DOCSTRING = re.compile(
    r"""\s*(?:\#[^\n]*\n\s*)*  # comments
    [rRuU]?(?P<quote>\"{3}|'{3})(?P<text>.*?)(?P=quote)""",
    re.DOTALL | re.VERBOSE,
)
_PRECISION = re.compile(r"^[ \t]*precision:[ \t]*(\S+)[ \t]*$", re.MULTILINE)


class FolderError(Exception):
    """Input that cannot be read as a problem or a solution, in one printable line.

    `about` is "problem" or "solution".
    """

    def __init__(self, about: str, where: object, expected: str, got: object) -> None:
        place, found = str(where), str(got)
        place = place if len(place) <= SHOWN else f"…{place[-SHOWN:]}"
        line = f"{place}: expected {expected}, got {found[:SHOWN]}"
        # Names of files are bytes to Linux: anything may stand in them, terminal codes too.
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line))
        self.about = about


class SettingsError(Exception):
    """Options of the command that do not go together."""


@dataclass(frozen=True, kw_only=True)
class SolutionFolder:
    """A solution and the names that were left aside."""

    solution: Solution
    ignored: tuple[str, ...]


def read_problem(path: str, target: Target, precision: Precision) -> Problem:
    """The problem in a file of KernelBench form. Raises FolderError."""
    with _blaming("problem", path, "a readable file"):
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            _wrong("problem", path, "a plain file", _kind(found.st_mode))
        text = _text("problem", path, _bytes("problem", path, path, None))
    return problem_of(text, target, precision, where=path)


def problem_of(
    text: str, target: Target, precision: Precision, where: str = "problem.code"
) -> Problem:
    """A problem from its text. Raises FolderError.

    `precision` holds where the module's docstring has no line `precision: …`. It then goes into
    the text as a last comment, because a problem's id is the hash of its text and the same text in
    another precision is another problem.
    """
    _check_text("problem", where, text)
    if not text.strip():
        _wrong("problem", where, "a module with Model, get_inputs and get_init_inputs", "no text")
    said = _stated_precision(text, where)
    if said is None:
        text = f"{text}\n# precision: {precision}\n"
    return Problem(
        problem_id=content_id(text),
        code=text,
        ops=("given",),
        data_source="given",
        families=("given",),
        target=target,
        precision=said or precision,
        seed=0,
        index=0,
    )


def _stated_precision(text: str, where: str) -> Precision | None:
    docstring = _DOCSTRING.match(text)
    line = _PRECISION.search(docstring["text"]) if docstring else None
    if line is None:
        return None
    if line[1] not in list(Precision):
        _wrong("problem", where, "precision: bf16, tf32 or fp32", f"{line[1]!r:.60}")
    return Precision(line[1])


def read_solution(path: str, form: str = "auto") -> SolutionFolder:
    """The solution in a folder (`model_new.py`, `kernels/`) or in one `.py` file, whatever its
    name. Raises FolderError."""
    with _blaming("solution", path, "a folder with model_new.py, or one .py file"):
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode) and path.endswith(".py"):
            files = {MODEL: _text("solution", path, _bytes("solution", path, path, None))}
            return SolutionFolder(solution=solution_of(files, form, path), ignored=())
        if not stat.S_ISDIR(mode):
            _wrong("solution", path, "a folder with model_new.py, or one .py file", _kind(mode))
        reader = _Reader(path)
        reader.read()
    solution = solution_of(reader.files, form, path)
    return SolutionFolder(solution=solution, ignored=tuple(sorted(reader.ignored)))


def solution_of(
    files: Mapping[str, str], form: str = "auto", where: str = "solution.files"
) -> Solution:
    """A solution from {path: text}; `auto` finds the form from the paths. Raises FolderError."""
    if len(files) > MAX_FILES:
        _wrong("solution", where, f"at most {MAX_FILES} files", len(files))
    for path, text in files.items():
        _check_path(where, path, files)
        _check_text("solution", f"{where}: {path}", text)
    total = sum(len(text.encode()) for text in files.values())
    if total > MAX_TOTAL_BYTES:
        _wrong("solution", where, f"at most {MAX_TOTAL_BYTES} bytes in all", total)
    if MODEL not in files:
        _wrong("solution", where, MODEL, f"{sorted(files)}")
    found = _form_of(files)
    if form not in ("auto", *FORMS):
        _wrong("solution", where, f"form auto, {', '.join(FORMS)}", f"{form!r:.60}")
    if form != "auto" and (form == "load_inline") != (found == "load_inline"):
        wanted = "model_new.py alone" if form == "load_inline" else "sources below kernels/"
        _wrong("solution", where, f"{wanted} for form {form}", f"{sorted(files)}")
    return Solution.of(dict(files), found if form == "auto" else form)


def _check_path(where: str, path: str, files: Mapping[str, str]) -> None:
    """What cannot be written or built under its own name is no file of a solution."""
    plain = len(path) <= MAX_PATH and _PATH.fullmatch(path) and ".." not in path
    if not plain or not path.endswith((MODEL, *SOURCES)):
        expected = f"model_new.py and kernels/NAME with {' '.join(SOURCES)}"
        _wrong("solution", where, expected, f"{path!r:.120}")
    folder = next((str(p) for p in PurePosixPath(path).parents if str(p) in files), None)
    if folder is not None:
        _wrong("solution", where, "a file or a folder of one name", f"both {folder!r}")


def _form_of(files: Mapping[str, str]) -> str:
    kernels = [path for path in files if path.startswith("kernels/")]
    if not kernels:
        return "load_inline"
    bound = any(PurePosixPath(path).stem.endswith("_binding") for path in kernels)
    return "paper" if bound else "cabi"


class _Reader:
    """Reads a solution folder through descriptors, so that nothing can be swapped for a link."""

    def __init__(self, root: str) -> None:
        self._root = root
        self.files: dict[str, str] = {}
        self.ignored: list[str] = []
        self._names = 0
        self._total = 0

    def read(self) -> None:
        descriptor = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for name, mode in self._entries(descriptor, ""):
                if name == MODEL:
                    self._take(descriptor, name, name, mode)
                elif name == "kernels":
                    self._descend(descriptor, name, name, mode, 1)
                else:
                    self.ignored.append(name)
        finally:
            os.close(descriptor)

    def _entries(self, descriptor: int, prefix: str) -> Iterator[tuple[str, int]]:
        with os.scandir(descriptor) as entries:
            for entry in entries:
                self._names += 1
                if self._names > MAX_NAMES:
                    _wrong("solution", self._root, f"at most {MAX_NAMES} names", "more")
                yield entry.name, entry.stat(follow_symlinks=False).st_mode

    def _descend(self, above: int, name: str, path: str, mode: int, depth: int) -> None:
        if not stat.S_ISDIR(mode):
            _wrong("solution", f"{self._root}/{path}", "a folder", _kind(mode))
        if depth > MAX_DEPTH:
            _wrong("solution", self._root, f"at most {MAX_DEPTH} folders deep", "more")
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=above)
        try:
            for inner, inner_mode in self._entries(descriptor, path):
                inner_path = f"{path}/{inner}"
                if inner.endswith(SOURCES):
                    self._take(descriptor, inner, inner_path, inner_mode)
                elif stat.S_ISDIR(inner_mode):
                    self._descend(descriptor, inner, inner_path, inner_mode, depth + 1)
                else:
                    self.ignored.append(inner_path)
        finally:
            os.close(descriptor)

    def _take(self, folder: int, name: str, path: str, mode: int) -> None:
        where = f"{self._root}/{path}"
        if not stat.S_ISREG(mode):
            _wrong("solution", where, "a plain file", _kind(mode))
        if len(self.files) >= MAX_FILES:
            _wrong("solution", self._root, f"at most {MAX_FILES} files", "more")
        data = _bytes("solution", where, name, folder)
        self._total += len(data)
        if self._total > MAX_TOTAL_BYTES:
            _wrong("solution", self._root, f"at most {MAX_TOTAL_BYTES} bytes in all", "more")
        self.files[path] = _text("solution", where, data)


def _bytes(about: str, where: str, name: str, folder: int | None) -> bytes:
    """The contents of a plain file. `folder`: the descriptor of the folder that has it; without
    one `name` is a path that the user gave, whose links are followed."""
    flags = (
        os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_NOFOLLOW if folder is not None else 0)
    )
    descriptor = os.open(name, flags, dir_fd=folder)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            _wrong(about, where, "a plain file", _kind(found.st_mode))
        if found.st_size > MAX_FILE_BYTES:
            _wrong(about, where, f"at most {MAX_FILE_BYTES} bytes", found.st_size)
        data = b""
        while chunk := os.read(descriptor, MAX_FILE_BYTES + 1 - len(data)):
            data += chunk
        if len(data) > MAX_FILE_BYTES:
            _wrong(about, where, f"at most {MAX_FILE_BYTES} bytes", "more")
        return data
    finally:
        os.close(descriptor)


def _text(about: str, where: str, data: bytes) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        _wrong(about, where, "UTF-8", f"byte 0x{data[error.start]:02x} at {error.start}")
    _check_text(about, where, text)
    return text


def _check_text(about: str, where: str, text: str) -> None:
    if "\0" in text:
        _wrong(about, where, "text", f"a NUL at {text.index(chr(0))}")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        _wrong(about, where, "text that UTF-8 can hold", f"half a character at {error.start}")
    if size > MAX_FILE_BYTES:
        _wrong(about, where, f"at most {MAX_FILE_BYTES} bytes", size)


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFREG: "a plain file",
    }
    return kinds.get(stat.S_IFMT(mode), "something else")


def _wrong(about: str, where: object, expected: str, got: object) -> NoReturn:
    raise FolderError(about, where, expected, got)


@contextmanager
def _blaming(about: str, where: str, expected: str) -> Iterator[None]:
    """What the operating system refuses is the input's fault: missing, closed to us, no name."""
    try:
        yield
    except OSError as error:
        raise FolderError(about, where, expected, error.strerror or error) from error
    except ValueError as error:  # a NUL in the path
        raise FolderError(about, where, expected, error) from error
