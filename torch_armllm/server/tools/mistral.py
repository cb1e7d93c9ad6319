"""Tool parser of Mistral models: ``[TOOL_CALLS] [{"name": …, "arguments": …}]``, or one marker per call.

Newer models write ``[TOOL_CALLS]name{…}`` or ``[TOOL_CALLS]name[ARGS]{…}`` for each call.
"""

from __future__ import annotations

import re
from typing import Any

from torch_armllm.server.tools.parser import (
    CallBuilder,
    OutputDelta,
    parse_call,
    parse_json_values,
    partial_marker_length,
)

MARKER = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(\{.*)", re.DOTALL)


class MistralToolParser:
    """A `ToolParser` that holds back everything after the first marker until the end."""

    def __init__(self) -> None:
        self._text = ""
        self._has_marker = False

    def feed(self, text: str) -> OutputDelta:
        """See `ToolParser`."""
        self._text += text
        if self._has_marker:
            return OutputDelta()
        position = self._text.find(MARKER)
        self._has_marker = position >= 0
        safe = len(self._text) - partial_marker_length(self._text, MARKER)
        end = position if self._has_marker else safe
        delta = OutputDelta(self._text[:end])
        self._text = self._text[end:]
        return delta

    def finish(self) -> OutputDelta:
        """See `ToolParser`."""
        if not self._has_marker:
            return OutputDelta(self._text)
        builder = CallBuilder()
        try:
            values = [value for part in self._text.split(MARKER)[1:] for value in _values(part)]
        except ValueError:
            return OutputDelta(self._text)
        calls = [call for call in map(parse_call, values) if call is not None]
        if not calls or len(calls) < len(values):
            return OutputDelta(self._text)
        return OutputDelta(calls=[builder.build(*call) for call in calls])


def _values(part: str) -> list[Any]:
    """Returns the calls after one marker, as JSON values."""
    if named := _NAMED.fullmatch(part):
        return [{"name": named[1], "arguments": value} for value in parse_json_values(named[2])]
    values: list[Any] = []
    for value in parse_json_values(part):
        values += value if isinstance(value, list) else [value]
    return values
