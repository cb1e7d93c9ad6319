"""Required tool calls: structured output forces the call's schema, so that every model can call."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch_armllm.chat_format.deltas import OutputDelta, OutputParser, ToolCallDelta, new_call_id
from torch_armllm.chat_format.parser import FormatParser
from torch_armllm.server.protocol.chat import Tool
from torch_armllm.server.tools.braces import Braces
from torch_armllm.server.tools.held_text import HeldText

_ANYTHING = {"type": "object"}
_COMPACT = {"x-guidance": {"whitespace_flexible": False}}
"""No free whitespace: calls are for programs, and small models may generate spaces without end."""

_CALL = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"parameters"\s*:\s*')
_NAME = re.compile(r'\{\s*"name"\s*:\s*"(.*)', re.DOTALL)
"""Beginnings of a call: up to its arguments, and up to its name."""


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


class ForcedCalls(NamedTuple):
    """Calls that an output consists of.

    Attributes:
        names: of the callable tools.
        named: True if the output is the arguments of the only one; else a list of calls.
    """

    names: tuple[str, ...]
    named: bool = False


def forced_parser(forced: ForcedCalls | None, parser: FormatParser) -> OutputParser:
    """Returns the parser of an output that may consist of forced calls.

    Args:
        forced: the calls; None: there are none.
        parser: of the reasoning before them.
    """
    return parser if forced is None else AfterReasoning(parser, forced)


class AfterReasoning:
    """An `OutputParser` of forced calls behind reasoning that is free."""

    def __init__(self, parser: FormatParser, forced: ForcedCalls) -> None:
        self._reasoning = parser
        self._calls: OutputParser = (
            NamedToolParser(forced.names[0]) if forced.named else RequiredToolParser(forced.names)
        )

    def feed(self, text: str) -> OutputDelta:
        """See `OutputParser`."""
        parts = self._reasoning.feed(text)
        calls = self._calls.feed(parts.content)
        return OutputDelta(calls.content, calls.calls, parts.reasoning)

    def finish(self, reason: str | None = "stop") -> OutputDelta:
        """See `OutputParser`; reasoning that is cut off calls nothing."""
        parts = self._reasoning.finish(reason)
        calls = self._calls.feed(parts.content)
        if self._reasoning.part != "reasoning":
            calls = calls.joined(self._calls.finish(reason))
        return OutputDelta(calls.content, calls.calls, parts.reasoning)


class NamedToolParser:
    """An `OutputParser` of the arguments of one call whose name is known."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started = False

    def feed(self, text: str) -> OutputDelta:
        """See `OutputParser`."""
        if not text:
            return OutputDelta()
        if self._started:
            return OutputDelta(calls=[ToolCallDelta(0, text)])
        self._started = True
        return OutputDelta(calls=[ToolCallDelta(0, text, self._name, new_call_id())])

    def finish(self, reason: str | None = "stop") -> OutputDelta:
        """See `OutputParser`."""
        return (
            OutputDelta()
            if self._started
            else OutputDelta(calls=[ToolCallDelta(0, "", self._name, new_call_id())])
        )


class RequiredToolParser:
    """An `OutputParser` of a JSON list of calls, each of which is returned when it is complete.

    Args:
        names: of the callable tools.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._names = names
        self._held = HeldText()
        self._braces = Braces()
        self._count = 0
        self._has_calls = False
        self._is_list = True

    def feed(self, text: str) -> OutputDelta:
        """See `OutputParser`."""
        delta = OutputDelta()
        at = 0
        for end in self._braces.ends(text) if self._is_list else ():
            self._held.add(text[at:end])
            at = end
            if (call := self._next_call()) is None:
                self._is_list = False
                break
            self._has_calls = True
            delta.calls.append(self._call(*call))
        self._held.add(text[at:])
        return delta

    def finish(self, reason: str | None = "stop") -> OutputDelta:
        """See `OutputParser`; a call that was cut off has the arguments so far."""
        text = self._held.take()
        if not self._is_list:  # no tool is called in this form
            return OutputDelta("" if self._has_calls else text)
        name, arguments = self._cut_call(text)
        return OutputDelta() if name is None else OutputDelta(calls=[self._call(name, arguments)])

    def _cut_call(self, text: str) -> tuple[str | None, str]:
        """Returns name and arguments of a call that the text breaks off in; no name if none is certain."""
        rest = text.lstrip()
        if self._has_calls:  # another call is certain only once it has begun
            rest = rest.removeprefix(",").lstrip()
            if not rest.startswith("{"):
                return None, ""
        rest = rest.removeprefix("[").lstrip()
        if (call := _CALL.match(rest)) is not None:
            return json.loads(call[1]), rest[call.end() :]
        quoted = _NAME.match(rest)
        begun = "" if quoted is None else quoted[1]
        possible = [name for name in self._names if _begins_alike(f'{name}"', begun)]
        return (possible[0] if len(possible) == 1 else None), ""

    def _call(self, name: str, arguments: Any) -> ToolCallDelta:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        self._count += 1
        return ToolCallDelta(self._count - 1, text, name, new_call_id())

    def _next_call(self) -> tuple[str, Any] | None:
        """Takes the call that is complete off the text; returns None, and leaves it, if it is none."""
        text = self._held.take()
        rest = text.strip()
        if rest.startswith("," if self._has_calls else "["):
            try:
                call = json.loads(rest[1:])
                if isinstance(call.get("name"), str) and isinstance(call.get("parameters"), dict):
                    return call["name"], call["parameters"]
            except (ValueError, RecursionError, AttributeError):
                pass
        self._held.add(text)
        return None


def _begins_alike(one: str, other: str) -> bool:
    """True if one of two texts is the beginning of the other."""
    return one.startswith(other) or other.startswith(one)
