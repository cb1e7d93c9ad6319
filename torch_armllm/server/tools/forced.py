"""Required tool calls: structured output forces the call's schema, so that every model can call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_armllm.server.protocol.chat import Tool
from torch_armllm.server.tools.parser import (
    CallBuilder,
    OutputDelta,
    ToolCallDelta,
    new_call_id,
    parse_call,
    parse_json_values,
)

_ANYTHING = {"type": "object"}
_COMPACT = {"x-guidance": {"whitespace_flexible": False}}
"""No free whitespace: calls are for programs, and small models may generate spaces without end."""


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """Returns the JSON schema of a tool's arguments."""
    return {**(tool.function.parameters or _ANYTHING), **_COMPACT}


def calls_schema(tools: Sequence[Tool], parallel: bool) -> dict[str, Any]:
    """Returns the JSON schema of an output that calls at least one of the tools.

    Args:
        tools: the callable tools.
        parallel: True if the output may hold several calls.
    """
    definitions: dict[str, Any] = {}
    calls = []
    for tool in tools:
        parameters = dict(tool.function.parameters or _ANYTHING)
        for key in ("$defs", "definitions"):  # JSON pointers to them start at the schema's root
            definitions.setdefault(key, {}).update(parameters.pop(key, None) or {})
        name = {"type": "string", "enum": [tool.function.name]}
        calls.append(
            {
                "type": "object",
                "properties": {"name": name, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not parallel:
        schema["maxItems"] = 1
    return {**schema, **_COMPACT, **{key: value for key, value in definitions.items() if value}}


class NamedToolParser:
    """A `ToolParser` of the arguments of one call whose name is known."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started = False

    def feed(self, text: str) -> OutputDelta:
        """See `ToolParser`."""
        if not text:
            return OutputDelta()
        if self._started:
            return OutputDelta(calls=[ToolCallDelta(0, text)])
        self._started = True
        return OutputDelta(calls=[ToolCallDelta(0, text, self._name, new_call_id())])

    def finish(self) -> OutputDelta:
        """See `ToolParser`."""
        return (
            OutputDelta()
            if self._started
            else OutputDelta(calls=[ToolCallDelta(0, "", self._name, new_call_id())])
        )


class RequiredToolParser:
    """A `ToolParser` of a JSON list of calls."""

    def __init__(self) -> None:
        self._text = ""

    def feed(self, text: str) -> OutputDelta:
        """See `ToolParser`."""
        self._text += text
        return OutputDelta()

    def finish(self) -> OutputDelta:
        """See `ToolParser`; a truncated list becomes content."""
        try:
            values = [value for calls in parse_json_values(self._text) for value in calls]
        except (ValueError, TypeError):
            return OutputDelta(self._text)
        calls = [call for call in map(parse_call, values) if call is not None]
        if not calls or len(calls) < len(values):
            return OutputDelta(self._text)
        builder = CallBuilder()
        return OutputDelta(calls=[builder.build(*call) for call in calls])
