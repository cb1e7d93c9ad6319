"""Content blocks of a message in Anthropic's format, and the events that tell of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json

from torch_armllm.chat_format.deltas import OutputDelta
from torch_armllm.server.handlers.streaming import Event

_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}


class MessageBlocks:
    """Builds the blocks of one message, one after the other.

    Attributes:
        content: all blocks so far.
    """

    def __init__(self) -> None:
        self.content: list[dict[str, Any]] = []
        self._arguments = ""
        self._open = False

    def add(self, delta: OutputDelta) -> Iterator[Event]:
        """Adds what was generated; yields the events of it."""
        if delta.reasoning:
            yield from self._add_text("thinking", delta.reasoning)
        if delta.content:
            yield from self._add_text("text", delta.content)
        for call in delta.calls:
            if call.name is not None:
                yield from self._begin({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            self._arguments += call.arguments
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def finish(self) -> Iterator[Event]:
        """Ends the last block; an empty message gets an empty text."""
        if not self.content:
            yield from self._begin({"type": "text", "text": ""})
        yield from self._end()

    def _add_text(self, kind: str, text: str) -> Iterator[Event]:
        name, field = _DELTAS[kind]
        if not self._open or self.content[-1]["type"] != kind:
            yield from self._begin(
                {"type": kind, field: "", **({"signature": ""} if kind == "thinking" else {})}
            )
        self.content[-1][field] += text
        yield self._delta({"type": name, field: text})

    def _begin(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self._end()
        self.content.append(block)
        self._open, self._arguments = True, ""
        yield {"type": "content_block_start", "index": len(self.content) - 1, "content_block": dict(block)}

    def _end(self) -> Iterator[Event]:
        if not self._open:
            return
        self._open = False
        if self.content[-1]["type"] == "tool_use":
            self.content[-1]["input"] = _parsed(self._arguments)
        yield {"type": "content_block_stop", "index": len(self.content) - 1}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}


def _parsed(arguments: str) -> dict[str, Any]:
    """Returns the arguments of a call; those of one that was cut off are what it has of them."""
    try:
        value = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
