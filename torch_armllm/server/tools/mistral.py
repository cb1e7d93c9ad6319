"""Tool parser of Mistral models: ``[TOOL_CALLS] [{"name": …, "arguments": …}]``, or one marker per call.

Newer models write ``[TOOL_CALLS]name{…}`` or ``[TOOL_CALLS]name[ARGS]{…}`` for each call.
"""

from __future__ import annotations

import re
from typing import Any

from torch_armllm.server.tools.held_text import HeldText
from torch_armllm.server.tools.parser import (
    CallBuilder,
    OutputDelta,
    parse_call,
    parse_json_values,
    partial_marker_length,
)

MARKER = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\w*\s*)?(?:\[ARGS\]\s*)?(\{.*)", re.DOTALL)
"""No two parts match the same white space, of which all ways to share it would be tried."""


class MistralToolParser:
    """A `ToolParser` that holds back everything after the first marker until the end."""

    def __init__(self) -> None:
        self._rest = ""  # may be the beginning of the first marker
        self._held = HeldText()  # from that marker on
        self._has_marker = False

    def feed(self, text: str) -> OutputDelta:
        """See `ToolParser`."""
        if self._has_marker:
            self._held.add(text)
            return OutputDelta()
        text = self._rest + text
        end = text.find(MARKER)
        if end >= 0:
            self._has_marker = True
            self._held.add(text[end:])
        else:
            end = len(text) - partial_marker_length(text, MARKER)
        self._rest = text[end:]
        return OutputDelta(text[:end])

    def finish(self) -> OutputDelta:
        """See `ToolParser`."""
        if not self._has_marker:
            return OutputDelta(self._rest)
        text = self._held.take()
        builder = CallBuilder()
        try:
            values = [value for part in text.split(MARKER)[1:] for value in _values(part)]
        except ValueError:
            return OutputDelta(text)
        calls = [call for call in map(parse_call, values) if call is not None]
        if not calls or len(calls) < len(values):
            return OutputDelta(text)
        return OutputDelta(calls=[builder.build(*call) for call in calls])


def _values(part: str) -> list[Any]:
    """Returns the calls after one marker, as JSON values."""
    if named := _NAMED.fullmatch(part):
        return [{"name": named[1], "arguments": value} for value in parse_json_values(named[2])]
    values: list[Any] = []
    for value in parse_json_values(part):
        values += value if isinstance(value, list) else [value]
    return values
