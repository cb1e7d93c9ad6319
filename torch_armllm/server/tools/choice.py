"""Tool choice: the tools that a request may call, and the parser of its outputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch_armllm.server.constraints import constraint
from torch_armllm.server.errors import ApiError
from torch_armllm.server.protocol.chat import ChatRequest, ChosenTool, Tool
from torch_armllm.server.served_format import ServedFormat
from torch_armllm.server.tools.forced import ForcedCalls, arguments_schema, calls_schema


@dataclass(frozen=True)
class ToolUse:
    """A request's use of tools.

    Attributes:
        tools: tools that the chat template describes to the model.
        forced: calls that the output consists of, in JSON; None: the model may call, as its format has it.
        settings: fields of `SamplingParams` that force a call, or keep the markers of calls in the text.
        finish_reason: finish reason of outputs with calls.
        parallel: True if an output may hold several calls.
    """

    tools: list[Tool] = field(default_factory=list)
    forced: ForcedCalls | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    finish_reason: str = "tool_calls"
    parallel: bool = True

    @property
    def schemas(self) -> dict[str, dict[str, Any] | None]:
        """Name and JSON schema of the arguments of each tool that the model may call."""
        if self.forced is not None:
            return {}
        return {tool.function.name: tool.function.parameters for tool in self.tools}


def tool_use(body: ChatRequest, served: ServedFormat) -> ToolUse:
    """Returns a request's use of tools.

    Args:
        body: the request.
        served: how the model writes calls.

    Raises:
        ApiError: the model's calls are not understood, or tools, tool_choice and response_format contradict
            each other.
    """
    tools, choice = body.tools or [], body.tool_choice
    if not tools:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice requires a tool, but tools is empty; give tools", "tool_choice")
        return ToolUse()
    parallel = body.parallel_tool_calls is not False
    if choice == "none":
        return ToolUse()
    served.check_tools()
    if choice in (None, "auto"):
        return ToolUse(tools, None, {"skip_special_tokens": False}, parallel=parallel)
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
        return ToolUse(tools, ForcedCalls((name,), True), settings, "stop")
    settings = {"structured_outputs": constraint("tools", json=calls_schema(tools, parallel))}
    names = tuple(tool.function.name for tool in tools)
    return ToolUse(tools, ForcedCalls(names), settings)
