"""Which tools a request may call, and how its answers are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch_armllm.engine.sampling_params import StructuredOutputsParams
from torch_armllm.server.errors import ApiError
from torch_armllm.server.protocol.chat import ChatRequest, ChosenTool, Tool
from torch_armllm.server.tools.forced import (
    NamedReader,
    RequiredReader,
    arguments_schema,
    calls_schema,
)
from torch_armllm.server.tools.hermes import HermesReader
from torch_armllm.server.tools.llama import LlamaReader
from torch_armllm.server.tools.mistral import MistralReader
from torch_armllm.server.tools.reader import PlainReader, Reader

READERS: Mapping[str, Callable[[], Reader]] = {
    "hermes": HermesReader,
    "llama": LlamaReader,
    "mistral": MistralReader,
}
_SIGNS = {
    "[TOOL_CALLS]": "mistral",
    "<tool_call>": "hermes",
    "<|python_tag|>": "llama",
    '"parameters"': "llama",
}


@dataclass(frozen=True)
class ToolUse:
    """How a request uses tools.

    Attributes:
        tools: described to the model.
        reader: makes what reads an answer.
        settings: of `SamplingParams`, that make the model call, or keep the marks of calls in the text.
        finish_reason: of answers that call.
        several: whether an answer may hold more than one call.
    """

    tools: list[Tool] = field(default_factory=list)
    reader: Callable[[], Reader] = PlainReader
    settings: dict[str, Any] = field(default_factory=dict)
    finish_reason: str = "tool_calls"
    several: bool = True


def tool_use(body: ChatRequest, template: str, parser: str | None) -> ToolUse:
    """How a request uses tools.

    Args:
        body: what the client says.
        template: of the model's conversations; tells how it writes calls.
        parser: a name of `READERS`, instead of what the template tells.

    Raises:
        ApiError: the tools and their choice contradict each other, or the request has another form in mind.
    """
    tools, choice = body.tools or [], body.tool_choice
    if not tools:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice demands a tool, but there are no tools", "tool_choice")
        return ToolUse()
    several = body.parallel_tool_calls is not False
    if choice == "none":
        return ToolUse()
    if choice in (None, "auto"):
        name = parser or parser_of(template)
        return ToolUse(tools, READERS[name], {"skip_special_tokens": False}, several=several)
    if body.response_format is not None and body.response_format.type != "text":
        raise ApiError(400, "an answer that has to be a call can have no response_format", "response_format")
    if isinstance(choice, ChosenTool):
        chosen = next((tool for tool in tools if tool.function.name == choice.function.name), None)
        if chosen is None:
            raise ApiError(400, f"there is no tool {choice.function.name[:200]!r}", "tool_choice")
        name = chosen.function.name
        settings = {"structured_outputs": StructuredOutputsParams(json=arguments_schema(chosen))}
        return ToolUse(tools, lambda: NamedReader(name), settings, "stop")
    settings = {"structured_outputs": StructuredOutputsParams(json=calls_schema(tools, several))}
    return ToolUse(tools, RequiredReader, settings)


def parser_of(template: str) -> str:
    """How a model with this template writes calls; ``hermes`` where nothing tells."""
    return next((name for sign, name in _SIGNS.items() if sign in template), "hermes")
