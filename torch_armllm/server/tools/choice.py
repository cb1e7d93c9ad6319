"""Tool choice: the tools that a request may call, and the parser of its outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch_armllm.chat_format.deltas import OutputParser
from torch_armllm.chat_format.format import ChatFormat
from torch_armllm.chat_format.model_format import ModelFormat
from torch_armllm.chat_format.rendering import make_parser
from torch_armllm.server.errors import ApiError
from torch_armllm.server.protocol.chat import ChatRequest, ChosenTool, Tool
from torch_armllm.server.served_format import check_tools
from torch_armllm.server.tools.forced import DemandedCalls, demanded
from torch_armllm.server.tools.strict import strict_calls


@dataclass(frozen=True)
class ToolUse:
    """A request's use of tools.

    Attributes:
        tools: tools that the chat template describes to the model.
        schemas: name and JSON schema of the arguments of each tool that the model may call.
        format: format of the output; None: the model's.
        demands: True if the output consists of calls.
        settings: fields of `SamplingParams` that constrain calls, or keep their markers in the text.
        finish_reason: finish reason of outputs with calls.
        parallel: True if an output may hold several calls.
    """

    tools: list[Tool] = field(default_factory=list)
    schemas: Mapping[str, dict[str, Any] | None] = field(default_factory=dict)
    format: ChatFormat | None = None
    demands: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    finish_reason: str = "tool_calls"
    parallel: bool = True

    @property
    def ends_with_call(self) -> bool:
        """True if an output that may go on has to end behind its first call."""
        return bool(self.schemas) and not (self.parallel or self.demands)

    def parser(self, served: ModelFormat, begins_in: str, continued: bool) -> OutputParser:
        """Returns the parser of an output.

        Args:
            served: how the model writes.
            begins_in: part that the output begins within.
            continued: True if the output continues a message.
        """
        keeps = served.keeps_reasoning
        how: dict[str, Any] = {"begins_in": begins_in, "continued": continued, "reasoning_is_content": keeps}
        parser = make_parser(self.format or served.format, self.schemas, **how)
        return DemandedCalls(parser, tuple(self.schemas), keeps) if self.demands else parser


def tool_use(body: ChatRequest, served: ModelFormat) -> ToolUse:
    """Returns a request's use of tools; a warning says where it asks for more than can be held to.

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
    if choice == "none":
        return ToolUse()
    check_tools(served)
    parallel = body.parallel_tool_calls is not False
    schemas = {tool.function.name: tool.function.parameters for tool in tools}
    if choice in (None, "auto"):
        settings = {"skip_special_tokens": False, **strict_calls(body, served.format, parallel)}
        return ToolUse(tools, schemas, settings=settings, parallel=parallel)
    if body.response_format is not None and body.response_format.type != "text":
        raise ApiError(
            400,
            "response_format cannot be combined with a required tool call; leave out one of them",
            "response_format",
        )
    reason = "tool_calls"
    if isinstance(choice, ChosenTool):
        name, reason, parallel = choice.function.name, "stop", False
        if name not in schemas:
            raise ApiError(400, f"tool_choice names {name[:200]!r}, which is not in tools", "tool_choice")
        schemas = {name: schemas[name]}
    structure, format = demanded(served.format, schemas, parallel)
    settings = {"structured_outputs": structure, "skip_special_tokens": False}
    return ToolUse(tools, schemas, format, True, settings, reason, parallel)
