"""Additions of a parser to a message: reasoning, content, and pieces of tool calls."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass, field, replace
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

    def joined(self, other: OutputDelta) -> OutputDelta:
        """Returns this with what another adds behind it; a call is in one piece."""
        calls = [replace(call) for call in self.calls]
        for call in other.calls:
            if calls and calls[-1].index == call.index:
                calls[-1].arguments += call.arguments
            else:
                calls.append(call)
        return OutputDelta(self.content + other.content, calls, self.reasoning + other.reasoning)


class OutputParser(Protocol):
    """Parses one generated text incrementally."""

    def feed(self, text: str) -> OutputDelta:
        """Parses the next characters."""
        ...

    def finish(self, reason: str | None = "stop") -> OutputDelta:
        """Parses the characters that were held back, after the text has ended.

        Args:
            reason: why it ended; ``length`` if a limit has cut it off.
        """
        ...
