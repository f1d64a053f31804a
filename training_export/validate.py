"""Rows against their Arrow schema, strictly.

`pa.Table.from_pylist` drops keys it does not know, also inside structs, and writes a null list
into a column that allows none as an empty list. Both would lose data without a word, so every row
is checked here first.
"""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa

from schemas.arrow import SCHEMAS


def validate(config: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return `row` when it fits the schema of `config` exactly.

    Raises ValueError naming the field: keys missing or unknown at any depth, a null where none is
    allowed, a value of another type (no int for a float, no bool for an int), a float that is not
    finite, a text UTF-8 cannot hold.
    """
    _check_keys(config, row, [field.name for field in SCHEMAS[config]])
    for field in SCHEMAS[config]:
        _check(f"{config}.{field.name}", field, row[field.name])
    return row


def _check_keys(where: str, value: Any, names: list[str]) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected a dict, got {type(value).__name__}")
    missing, unknown = sorted(set(names) - set(value)), sorted(set(value) - set(names))
    if missing or unknown:
        raise ValueError(f"{where}: missing keys {missing}, unknown keys {unknown}")


def _check(where: str, field: pa.Field, value: Any) -> None:
    if value is None:
        if not field.nullable:
            raise ValueError(f"{where}: null in a column that allows none")
    elif pa.types.is_list(field.type):
        if not isinstance(value, list):
            raise ValueError(f"{where}: expected a list, got {type(value).__name__}")
        for i, item in enumerate(value):
            _check(f"{where}[{i}]", field.type.value_field, item)
    elif pa.types.is_struct(field.type):
        _check_keys(where, value, [inner.name for inner in field.type])
        for inner in field.type:
            _check(f"{where}.{inner.name}", inner, value[inner.name])
    else:
        _check_scalar(where, field.type, value)


def _check_scalar(where: str, kind: pa.DataType, value: Any) -> None:
    expected = {pa.string(): str, pa.int64(): int, pa.float64(): float, pa.bool_(): bool}[kind]
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        raise ValueError(f"{where}: expected {expected.__name__}, got {type(value).__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where}: {value} is not finite; null means not measured")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{where}: not valid Unicode, {error}") from None
