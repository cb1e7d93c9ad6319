"""Calls that a request demands: in the model's format, or in JSON where no grammar expresses that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch_armllm.chat_format.deltas import OutputDelta, ToolCallDelta, new_call_id
from torch_armllm.chat_format.format import CallFormat, ChatFormat, JsonFormat
from torch_armllm.chat_format.grammar import forced_calls
from torch_armllm.chat_format.parser import FormatParser, Tools
from torch_armllm.engine.sampling_params import StructuredOutputsParams
from torch_armllm.server.constraints import constraint
from torch_armllm.server.middleware.warnings import note_warnings

_ANYTHING = {"type": "object"}
_COMPACT = {"x-guidance": {"whitespace_flexible": False}}
"""No free whitespace: calls are for programs, and small models may generate spaces without end."""
_JSON_CALLS = CallFormat("json", json=JsonFormat(arguments="parameters", is_list=True))


def demanded(format: ChatFormat, tools: Tools, parallel: bool) -> tuple[StructuredOutputsParams, ChatFormat]:
    """Returns the constraint of an output that consists of calls, and the output's format.

    The format is the model's own; where a grammar cannot express it, a list of calls in JSON, and the
    response warns of that.

    Args:
        format: the model's format.
        tools: name and JSON schema of the arguments of each tool that may be called.
        parallel: True if there may be several calls.

    Raises:
        ApiError: the schemas are larger than allowed.
    """
    try:
        tag = forced_calls(format, tools, parallel)
        return StructuredOutputsParams(structural_tag=tag), format
    except ValueError as error:
        schema = constraint("tools", json=calls_schema(tools, parallel))
        why = ascii(str(error).removeprefix("structured outputs: ")[:200])[1:-1]
        note_warnings(
            [f"the model is made to write calls as JSON, which is not its own format, because {why}"]
        )
        return schema, replace(format, calls=_JSON_CALLS, messages="", begun="")


def calls_schema(tools: Tools, parallel: bool) -> dict[str, Any]:
    """Returns the JSON schema of an output that calls at least one of the tools.

    Args:
        tools: name and JSON schema of the arguments of each.
        parallel: True if the output may hold several calls.
    """
    definitions: dict[str, Any] = {}
    calls = []
    for called, schema_of_tool in tools.items():
        parameters = dict(schema_of_tool or _ANYTHING)
        for key in ("$defs", "definitions"):  # JSON pointers to them start at the schema's root
            definitions.setdefault(key, {}).update(parameters.pop(key, None) or {})
        name = {"type": "string", "enum": [called]}
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


class DemandedCalls:
    """An `OutputParser` of an output that consists of calls behind reasoning that is free.

    Args:
        parser: of the output.
        names: of the tools that may be called.
        keeps_content: True if the reasoning is content.
    """

    def __init__(self, parser: FormatParser, names: Sequence[str], keeps_content: bool) -> None:
        self._parser, self._names, self._keeps_content = parser, names, keeps_content
        self._has_calls = False

    def feed(self, text: str) -> OutputDelta:
        """See `OutputParser`."""
        return self._of_calls(self._parser.feed(text))

    def finish(self, reason: str | None = "stop") -> OutputDelta:
        """See `OutputParser`; a call that is cut off before its name is one if it can be of one tool only."""
        delta = self._of_calls(self._parser.finish(reason))
        if not self._has_calls and self._parser.part != "reasoning" and len(self._names) == 1:
            delta.calls.append(ToolCallDelta(0, "", self._names[0], new_call_id()))
        return delta

    def _of_calls(self, delta: OutputDelta) -> OutputDelta:
        """Returns what an output adds, without what was cut off before the name of a call."""
        self._has_calls = self._has_calls or bool(delta.calls)
        return delta if self._keeps_content else replace(delta, content="")
