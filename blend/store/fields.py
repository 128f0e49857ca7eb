"""The values in a file's header, none believed before its type is known. All raise ValueError that says what is wrong."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

_COUNT = re.compile(r"0|[1-9][0-9]{0,9}")


class StoredType(NamedTuple):
    """A dtype: its name in torch and the bytes of one value."""

    name: str
    nbytes: int

    @property
    def is_floating_point(self) -> bool:
        """Whether KV can have it."""
        return "float" in self.name


TYPES = {
    "F64": StoredType("float64", 8),
    "F32": StoredType("float32", 4),
    "F16": StoredType("float16", 2),
    "BF16": StoredType("bfloat16", 2),
    "F8_E4M3": StoredType("float8_e4m3fn", 1),
    "F8_E5M2": StoredType("float8_e5m2", 1),
    "I32": StoredType("int32", 4),
    "I16": StoredType("int16", 2),
    "I8": StoredType("int8", 1),
    "U8": StoredType("uint8", 1),
}


def as_fields(value: object, what: str) -> dict[str, Any]:
    """A JSON object."""
    if type(value) is not dict:
        raise ValueError(f"{what} is not described")
    return value


def as_text(meta: Mapping[str, object], name: str) -> str:
    """A string."""
    value = meta.get(name)
    if type(value) is not str:
        raise ValueError(f"{name} is {shown(value)}")
    return value


def as_count(meta: Mapping[str, object], name: str) -> int:
    """A whole number that is not negative, written in a string as `str` writes it."""
    value = as_text(meta, name)
    if not _COUNT.fullmatch(value):
        raise ValueError(f"{name} is {shown(value)}")
    return int(value)


def as_counts(value: object, length: int, what: str) -> list[int]:
    """A list of so many whole numbers, none negative; true and false are no numbers."""
    if type(value) is list and len(value) == length and all(type(one) is int and one >= 0 for one in value):
        return value
    raise ValueError(f"{what} is {shown(value)}")


def as_type(name: object) -> StoredType:
    """The type of that name."""
    stored = TYPES.get(name) if type(name) is str else None
    if stored is None:
        raise ValueError(f"it has values of type {shown(name)}")
    return stored


def shown(value: object) -> str:
    """A value for a message, not all of a long one."""
    return f"{value!r:.60}"
