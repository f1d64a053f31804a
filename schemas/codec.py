"""Records as plain JSON values and back, and the hashes that name them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import types
import typing
from enum import StrEnum
from typing import Any, TypeVar


def content_id(text: str) -> str:
    """The id of a text: the first 16 hex digits of its SHA-256."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def content_key(*parts: Any) -> str:
    """The key of finished work: SHA-256 over the canonical JSON of everything it depends on."""
    blob = json.dumps(
        to_json(list(parts)), sort_keys=True, separators=(",", ":"), ensure_ascii=True
    )
    return hashlib.sha256(blob.encode()).hexdigest()[:32]


def to_json(value: Any) -> Any:
    """Records, enums and tuples as plain JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
    return str(value) if isinstance(value, StrEnum) else value


Record = TypeVar("Record")


def from_json(kind: type[Record], value: Any) -> Record:
    """The inverse of `to_json`. Raises ValueError when keys are missing or unknown."""
    return typing.cast(Record, _decode(kind, value))


def _decode(kind: Any, value: Any) -> Any:
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return _decode(next(arg for arg in typing.get_args(kind) if arg is not type(None)), value)
    if origin is tuple:
        return tuple(_decode(typing.get_args(kind)[0], item) for item in value)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        if set(value) != set(hints):
            raise ValueError(f"{kind.__name__}: expected keys {sorted(hints)}, got {sorted(value)}")
        return kind(**{name: _decode(hint, value[name]) for name, hint in hints.items()})
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return kind(value)
    return float(value) if kind is float else value
