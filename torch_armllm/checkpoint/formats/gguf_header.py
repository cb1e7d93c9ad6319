"""The fields of a GGUF file's header, and which of them somebody read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class Header:
    """Fields of a model, by their names without the architecture.

    Each method marks the field as read.

    Attributes:
        path: the file, for messages.
        architecture: llama.cpp's name of the architecture.
    """

    def __init__(self, path: str, architecture: str, fields: Mapping[str, Any]) -> None:
        self.path = path
        self.architecture = architecture
        self._fields = {
            name.removeprefix(f"{architecture}."): field
            for name, field in fields.items()
            if name.startswith(f"{architecture}.")
        }
        self._read: set[str] = set()

    def value(self, name: str) -> Any:
        """Returns a field, a list where all blocks have one of their own; None if the file has no such field.

        A list of equal values is the value.
        """
        if name not in self._fields:
            return None
        self._read.add(name)
        value = self._fields[name].contents()
        if isinstance(value, list) and value and all(one == value[0] for one in value):
            return value[0]
        return value

    def number(self, name: str) -> float | None:
        """Returns a finite number; None if the file has no such field."""
        value = self.value(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.wrong(name, value, "a number")
        return float(value)

    def integer(self, name: str) -> int | None:
        """Returns an integer; None if the file has no such field."""
        value = self.value(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(name, value, "an integer")
        return value

    def wrong(self, name: str, value: Any, expected: str) -> ValueError:
        """Returns the error of a field that is something else than expected."""
        return ValueError(f"{name} in the header of {self.path} is {value!r}, and {expected} is expected")

    def unsupported(self, name: str, value: Any, model: str) -> ValueError:
        """Returns the error of a field that the model cannot follow."""
        return ValueError(
            f"{name} in the header of {self.path} is {value!r}, and transformers' {model} has no setting for "
            "it: it would compute something else than the file says; use a transformers checkpoint of the "
            "model instead"
        )

    def skip(self, *names: str) -> None:
        """Marks fields as read that change no output."""
        self._read.update(names)

    def unread(self) -> list[str]:
        """Returns the full names of the fields that nobody read."""
        return [f"{self.architecture}.{name}" for name in self._fields if name not in self._read]


def settable(config: object, name: str) -> bool:
    """True if a configuration has an attribute that is not computed of others."""
    return hasattr(config, name) and not isinstance(getattr(type(config), name, None), property)
