"""Custom tools, which take a text: to the model each is a function with one parameter."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from torch_armllm.chat_format.deltas import ToolCallDelta

INPUT = "input"
"""The parameter of the function that stands for a custom tool."""


def custom_function(name: str, description: str | None, format: Any) -> dict[str, Any]:
    """Returns the function that stands for a custom tool.

    Args:
        name: of the tool.
        description: of the tool.
        format: of its text; a grammar is added to the description.
    """
    texts = [description or ""]
    form = format if isinstance(format, dict) else {}
    grammar = form.get("grammar")
    form = grammar if isinstance(grammar, dict) else form  # the form of chat completions
    if isinstance(definition := form.get("definition"), str):
        texts.append(f"The {INPUT} has to match this grammar ({form.get('syntax', 'lark')}):\n{definition}")
    schema = {"type": "string", "description": "The text that the tool gets."}
    return {
        "name": name,
        "description": "\n\n".join(filter(None, texts)),
        "parameters": {"type": "object", "properties": {INPUT: schema}, "required": [INPUT]},
    }


def custom_arguments(text: str) -> str:
    """Returns the arguments of the function that stands for a custom tool."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """Returns the text that a call gives to a custom tool; arguments of another form are the text."""
    try:
        given = json.loads(arguments or "{}")
    except ValueError:
        return arguments
    text = given.get(INPUT, None if given else "") if isinstance(given, dict) else None
    return text if isinstance(text, str) else arguments


def custom_call(call: ToolCallDelta) -> dict[str, Any]:
    """Returns a whole call of a custom tool in the form of chat completions."""
    custom = {"name": call.name, "input": custom_input(call.arguments)}
    return {"index": call.index, "id": call.id, "type": "custom", "custom": custom}


class CallStream:
    """Tool calls of an output in a stream; the text of a custom tool's call comes whole, at its end.

    Args:
        custom: names of the custom tools.
    """

    def __init__(self, custom: Collection[str]) -> None:
        self._custom = custom
        self._open: ToolCallDelta | None = None

    def deltas(self, calls: Sequence[ToolCallDelta], finished: bool) -> list[dict[str, Any]]:
        """Returns what new pieces of calls add to a stream.

        Args:
            calls: the pieces.
            finished: True if the output has finished.
        """
        told: list[dict[str, Any]] = []
        for call in calls:
            if call.name is not None:
                self._end(told)
            if call.name is not None and call.name in self._custom:
                self._open = replace(call)
                told.append(custom_call(ToolCallDelta(call.index, "", call.name, call.id)))
            elif self._open is not None:
                self._open.arguments += call.arguments
            else:
                told.append(call.to_delta())
        if finished:
            self._end(told)
        return told

    def _end(self, told: list[dict[str, Any]]) -> None:
        if self._open is None:
            return
        text = custom_input(self._open.arguments)
        if told and told[-1]["index"] == self._open.index:
            told[-1]["custom"]["input"] = text
        else:
            told.append({"index": self._open.index, "custom": {"input": text}})
        self._open = None
