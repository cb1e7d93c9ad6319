"""Access to the ``quantization_config`` of other tools, which may hold anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def integer(settings: Mapping[str, Any], name: str, default: int) -> int:
    """Returns an integer of the settings; the default if it is missing.

    Raises:
        ValueError: it is no integer.
    """
    value = settings.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} is {value!r}, and an integer is expected")
    return value


def flag(settings: Mapping[str, Any], name: str, default: bool, nullable: bool = True) -> bool:
    """Returns a boolean of the settings; the default if it is missing, or null and ``nullable``.

    Raises:
        ValueError: it is neither true nor false.
    """
    value = settings.get(name)
    if not isinstance(value, bool) and (value is not None or (name in settings and not nullable)):
        raise ValueError(f"{name} is {value!r}, and true or false is expected")
    return default if value is None else value


def mapping(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns an object of the settings; an empty one if it is missing or null.

    Raises:
        ValueError: it is no object.
    """
    value = settings.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{name} is {value!r}, and an object is expected")
    return value or {}


def group_count(size: int, columns: int) -> int:
    """Returns the number of groups of a row.

    Raises:
        ValueError: no tool groups so: the same number of scales would then mean another weight.
    """
    if size == -1 or size >= columns:
        return 1
    if size < 1 or (columns % size and size & (size - 1)):
        raise ValueError(
            f"group_size is {size}, and -1, a power of two or a divisor of the {columns} columns is expected"
        )
    return -(-columns // size)
