"""Tool parsers: split a generated text into content and tool calls while it streams."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

_ID_CHARACTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9  # Mistral's chat templates require it


def new_call_id() -> str:
    """Returns a new random id of a tool call."""
    return "".join(random.choices(_ID_CHARACTERS, k=_ID_LENGTH))


@dataclass
class ToolCallDelta:
    """A piece of a tool call: the first piece has a name, and all pieces' arguments concatenate to JSON."""

    index: int
    arguments: str
    name: str | None = None
    id: str | None = None

    def to_delta(self) -> dict[str, Any]:
        """Returns the piece in OpenAI's stream format."""
        if self.name is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


@dataclass
class OutputDelta:
    """New content, new pieces of tool calls, and new reasoning before them."""

    content: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)
    reasoning: str = ""


class ToolParser(Protocol):
    """Parses one generated text incrementally."""

    def feed(self, text: str) -> OutputDelta:
        """Parses the next characters."""
        ...

    def finish(self) -> OutputDelta:
        """Parses the characters that were held back, after the text has ended."""
        ...


class PlainTextParser:
    """A parser of texts without tool calls."""

    def feed(self, text: str) -> OutputDelta:
        """See `ToolParser`."""
        return OutputDelta(text)

    def finish(self) -> OutputDelta:
        """See `ToolParser`."""
        return OutputDelta()


class CallBuilder:
    """Builds the tool calls of one text, with consecutive indices."""

    def __init__(self) -> None:
        self._count = 0

    def build(self, name: str, arguments: Any) -> ToolCallDelta:
        """Returns a complete call."""
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        self._count += 1
        return ToolCallDelta(self._count - 1, text, name, new_call_id())


def parse_call(value: Any) -> tuple[str, Any] | None:
    """Returns name and arguments of a JSON value that is a tool call; None if it is not."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models encode the arguments twice
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    return (value["name"], arguments) if isinstance(arguments, dict) else None


def parse_json_values(text: str) -> Iterator[Any]:
    """Yields consecutive JSON values, separated by spaces, commas or semicolons.

    Raises:
        ValueError: the text contains anything else.
    """
    decoder = json.JSONDecoder()
    position = 0
    while True:
        while position < len(text) and (text[position].isspace() or text[position] in ",;"):
            position += 1
        if position == len(text):
            return
        try:
            value, position = decoder.raw_decode(text, position)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
        yield value


def partial_marker_length(text: str, marker: str) -> int:
    """Returns the number of trailing characters that may be the beginning of a marker."""
    lengths = range(min(len(text), len(marker) - 1), 0, -1)
    return next((n for n in lengths if marker.startswith(text[-n:])), 0)
