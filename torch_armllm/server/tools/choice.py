"""Tool choice: the tools that a request may call, and the parser of its outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch_armllm.server.constraints import constraint
from torch_armllm.server.errors import ApiError
from torch_armllm.server.protocol.chat import ChatRequest, ChosenTool, Tool
from torch_armllm.server.tools.forced import (
    NamedToolParser,
    RequiredToolParser,
    arguments_schema,
    calls_schema,
)
from torch_armllm.server.tools.hermes import HermesToolParser
from torch_armllm.server.tools.llama import LlamaToolParser
from torch_armllm.server.tools.mistral import MistralToolParser
from torch_armllm.server.tools.parser import PlainTextParser, ToolParser

TOOL_PARSERS: Mapping[str, Callable[[], ToolParser]] = {
    "hermes": HermesToolParser,
    "llama": LlamaToolParser,
    "mistral": MistralToolParser,
}
_TEMPLATE_MARKERS = {
    "[TOOL_CALLS]": "mistral",
    "<tool_call>": "hermes",
    "<|python_tag|>": "llama",
    '"parameters"': "llama",
}


@dataclass(frozen=True)
class ToolUse:
    """A request's use of tools.

    Attributes:
        tools: tools that the chat template describes to the model.
        make_parser: creates the parser of an output.
        settings: fields of `SamplingParams` that force a call, or keep the markers of calls in the text.
        finish_reason: finish reason of outputs with calls.
        parallel: True if an output may hold several calls.
    """

    tools: list[Tool] = field(default_factory=list)
    make_parser: Callable[[], ToolParser] = PlainTextParser
    settings: dict[str, Any] = field(default_factory=dict)
    finish_reason: str = "tool_calls"
    parallel: bool = True


def tool_use(body: ChatRequest, template: str, parser: str | None) -> ToolUse:
    """Returns a request's use of tools.

    Args:
        body: the request.
        template: the chat template; identifies the model's format of calls.
        parser: a name of `TOOL_PARSERS`; None: detected from the template.

    Raises:
        ApiError: tools, tool_choice and response_format contradict each other.
    """
    tools, choice = body.tools or [], body.tool_choice
    if not tools:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice requires a tool, but tools is empty; give tools", "tool_choice")
        return ToolUse()
    parallel = body.parallel_tool_calls is not False
    if choice == "none":
        return ToolUse()
    if choice in (None, "auto"):
        name = parser or detect_parser(template)
        return ToolUse(tools, TOOL_PARSERS[name], {"skip_special_tokens": False}, parallel=parallel)
    if body.response_format is not None and body.response_format.type != "text":
        raise ApiError(
            400,
            "response_format cannot be combined with a required tool call; leave out one of them",
            "response_format",
        )
    if isinstance(choice, ChosenTool):
        chosen = next((tool for tool in tools if tool.function.name == choice.function.name), None)
        if chosen is None:
            raise ApiError(
                400, f"tool_choice names {choice.function.name[:200]!r}, which is not in tools", "tool_choice"
            )
        name = chosen.function.name
        settings = {"structured_outputs": constraint("tools", json=arguments_schema(chosen))}
        return ToolUse(tools, lambda: NamedToolParser(name), settings, "stop")
    settings = {"structured_outputs": constraint("tools", json=calls_schema(tools, parallel))}
    names = [tool.function.name for tool in tools]
    return ToolUse(tools, lambda: RequiredToolParser(names), settings)


def detect_parser(template: str) -> str:
    """Returns the name of the tool parser that fits a chat template; ``hermes`` by default."""
    return next((name for marker, name in _TEMPLATE_MARKERS.items() if marker in template), "hermes")
