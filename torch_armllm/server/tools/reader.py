"""What a client hears of an answer's text, as it is written."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

_SIGNS = string.ascii_letters + string.digits
_ID_LENGTH = 9  # as Mistral's templates want it


def call_id() -> str:
    """A new name of a call."""
    return "".join(random.choices(_SIGNS, k=_ID_LENGTH))


@dataclass
class CallPiece:
    """A piece of a call: its beginning has a name, and all pieces' arguments together are the JSON."""

    index: int
    arguments: str
    name: str | None = None
    id: str | None = None

    def to_delta(self) -> dict[str, Any]:
        """As a stream has it."""
        if self.name is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


@dataclass
class Heard:
    """What is new: text, and pieces of calls."""

    content: str = ""
    calls: list[CallPiece] = field(default_factory=list)


class Reader(Protocol):
    """Reads one answer."""

    def feed(self, text: str) -> Heard:
        """Takes what the answer goes on with."""
        ...

    def finish(self) -> Heard:
        """What was held back, when the answer has ended."""
        ...


class PlainReader:
    """An answer without calls."""

    def feed(self, text: str) -> Heard:
        """See `Reader`."""
        return Heard(text)

    def finish(self) -> Heard:
        """See `Reader`."""
        return Heard()


class Numbering:
    """Makes calls, one after the other."""

    def __init__(self) -> None:
        self._count = 0

    def call(self, name: str, arguments: Any) -> CallPiece:
        """A whole call."""
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        self._count += 1
        return CallPiece(self._count - 1, text, name, call_id())


def as_call(value: Any) -> tuple[str, Any] | None:
    """Name and arguments, where a value is a call as models write them."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the JSON of the arguments' JSON
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    return (value["name"], arguments) if isinstance(arguments, dict) else None


def json_values(text: str) -> Iterator[Any]:
    """JSON values one after the other, separated by spaces, commas or semicolons.

    Raises:
        ValueError: there is something else.
    """
    decoder = json.JSONDecoder()
    place = 0
    while True:
        while place < len(text) and (text[place].isspace() or text[place] in ",;"):
            place += 1
        if place == len(text):
            return
        try:
            value, place = decoder.raw_decode(text, place)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
        yield value


def held(text: str, mark: str) -> int:
    """How many of the last characters may be the beginning of a mark."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-n:])), 0)
