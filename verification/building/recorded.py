"""One call of `load_inline` or `load`, as it was recorded: content, not code that is run.

It is made in the solution's process and read in the judge's, which believes nothing about it: it is
text that a compiler gets, under names that can stand on a command line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from schemas.codec import content_key, to_json

MAX_CALLS = 16
MAX_BYTES = 4 << 20
"""Of all texts of one call."""
MAX_STRINGS = 256
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
PATH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")


class FormError(Exception):
    """A solution that is not of its form; says what was expected and what came."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """A name (of a file, of a function) and the text that goes with it."""

    name: str
    text: str


@dataclass(frozen=True, kw_only=True)
class ExtensionCall:
    """An extension a solution asks for.

    `load_inline` gives `cpp_sources`, `cuda_sources` and perhaps `functions` (name, docstring);
    `load` gives `files` (path below the solution's folder, text), of which `compiled` are compiled.
    """

    name: str
    cpp_sources: tuple[str, ...] = ()
    cuda_sources: tuple[str, ...] = ()
    functions: tuple[Text, ...] | None = None
    error_handling: bool = True
    implicit_headers: bool = True
    files: tuple[Text, ...] = ()
    compiled: tuple[str, ...] = ()
    cflags: tuple[str, ...] = ()
    cuda_cflags: tuple[str, ...] = ()
    ldflags: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The hash of everything it says: by this its library is asked for."""
        return content_key(self)

    def to_json(self) -> dict[str, Any]:
        return to_json(self)

    @staticmethod
    def read(value: Any) -> ExtensionCall:
        """A call from JSON of a solution's process. Raises FormError."""
        if not isinstance(value, Mapping) or set(value) != set(ExtensionCall.__annotations__):
            raise FormError(f"expected a recorded call, got {value!r:.200}")
        functions = value["functions"]
        call = ExtensionCall(
            name=_matching(NAME, value["name"], "name="),
            cpp_sources=_strings(value["cpp_sources"], "cpp_sources="),
            cuda_sources=_strings(value["cuda_sources"], "cuda_sources="),
            functions=None if functions is None else _texts(functions, "functions="),
            error_handling=value["error_handling"] is True,
            implicit_headers=value["implicit_headers"] is True,
            files=_texts(value["files"], "sources="),
            compiled=_strings(value["compiled"], "sources="),
            cflags=_strings(value["cflags"], "extra_cflags="),
            cuda_cflags=_strings(value["cuda_cflags"], "extra_cuda_cflags="),
            ldflags=_strings(value["ldflags"], "extra_ldflags="),
        )
        for file in call.files:
            _matching(PATH, file.name, "sources=")
        texts = (*call.cpp_sources, *call.cuda_sources, *(file.text for file in call.files))
        if sum(map(len, texts)) > MAX_BYTES:
            raise FormError(f"expected at most {MAX_BYTES} bytes of source for {call.name}")
        return call


def read_calls(value: Any) -> tuple[ExtensionCall, ...]:
    """All calls of a solution, each once. Raises FormError."""
    if not isinstance(value, list) or len(value) > MAX_CALLS:
        raise FormError(f"expected at most {MAX_CALLS} calls of load_inline, got {value!r:.100}")
    return tuple({call.key: call for call in map(ExtensionCall.read, value)}.values())


def _strings(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or len(value) > MAX_STRINGS:
        raise FormError(f"{where} expected at most {MAX_STRINGS} strings, got {value!r:.200}")
    for item in value:
        _plain(item, where)
    return tuple(value)


def _plain(value: Any, where: str) -> str:
    """A string that can be written to a file."""
    if not isinstance(value, str):
        raise FormError(f"{where} expected a string, got {value!r:.200}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise FormError(f"{where} expected text, got {error}") from error
    return value


def _texts(value: Any, where: str) -> tuple[Text, ...]:
    if not isinstance(value, list | tuple) or len(value) > MAX_STRINGS:
        raise FormError(f"{where} expected at most {MAX_STRINGS} names, got {value!r:.200}")
    found = []
    for item in value:
        if not isinstance(item, Mapping) or set(item) != {"name", "text"}:
            raise FormError(f"{where} expected a name and a text, got {item!r:.200}")
        found.append(Text(name=_plain(item["name"], where), text=_plain(item["text"], where)))
    return tuple(found)


def _matching(pattern: re.Pattern[str], value: Any, where: str) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise FormError(f"{where} expected {pattern.pattern}, got {value!r:.200}")
    return value
