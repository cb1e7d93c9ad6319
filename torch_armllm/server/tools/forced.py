"""Calls that a client demands: the answer is made to match their schema, so that every model can do it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_armllm.server.protocol.chat import Tool
from torch_armllm.server.tools.reader import (
    CallPiece,
    Heard,
    Numbering,
    as_call,
    call_id,
    json_values,
)

_ANYTHING = {"type": "object"}
_COMPACT = {"x-guidance": {"whitespace_flexible": False}}
"""Programs read calls; and small models may write spaces without end."""


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """Of a tool's arguments."""
    return {**(tool.function.parameters or _ANYTHING), **_COMPACT}


def calls_schema(tools: Sequence[Tool], several: bool) -> dict[str, Any]:
    """Of an answer that calls at least one of some tools."""
    definitions: dict[str, Any] = {}
    calls = []
    for tool in tools:
        parameters = dict(tool.function.parameters or _ANYTHING)
        for key in ("$defs", "definitions"):  # references to them start at the top of the schema
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
    if not several:
        schema["maxItems"] = 1
    return {**schema, **_COMPACT, **{key: found for key, found in definitions.items() if found}}


class NamedReader:
    """Reads the arguments of one call whose name is known; see `Reader`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False

    def feed(self, text: str) -> Heard:
        """See `Reader`."""
        if not text:
            return Heard()
        if self._begun:
            return Heard(calls=[CallPiece(0, text)])
        self._begun = True
        return Heard(calls=[CallPiece(0, text, self._name, call_id())])

    def finish(self) -> Heard:
        """See `Reader`."""
        return Heard() if self._begun else Heard(calls=[CallPiece(0, "", self._name, call_id())])


class RequiredReader:
    """Reads a list of calls; see `Reader`."""

    def __init__(self) -> None:
        self._text = ""

    def feed(self, text: str) -> Heard:
        """See `Reader`."""
        self._text += text
        return Heard()

    def finish(self) -> Heard:
        """See `Reader`: a list that was cut off is text."""
        try:
            values = [value for found in json_values(self._text) for value in found]
        except (ValueError, TypeError):
            return Heard(self._text)
        calls = [call for call in map(as_call, values) if call is not None]
        if not calls or len(calls) < len(values):
            return Heard(self._text)
        numbering = Numbering()
        return Heard(calls=[numbering.call(*call) for call in calls])
