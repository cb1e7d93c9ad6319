"""Tools of requests of `/v1/responses`: functions, and custom tools, which take a text."""

from __future__ import annotations

from typing import Any

from torch_armllm.server.chat_parts import chosen_tool, function_tool
from torch_armllm.server.custom_tools import custom_function
from torch_armllm.server.errors import ApiError
from torch_armllm.server.middleware.warnings import note_warnings
from torch_armllm.server.protocol.chat import Tool, allowed_tools
from torch_armllm.server.protocol.responses import NamedTool, ResponsesRequest, ResponseTool

_KNOWN = ("function", "custom")


def tools_and_choice(body: ResponsesRequest) -> tuple[list[Tool] | None, Any]:
    """Returns the tools of a request as functions, and its choice among them.

    Tools that a server would run itself are left out with a warning where the client has tools of its own.

    Raises:
        ApiError: there is nothing but tools that a server would run, or the choice names none.
    """
    if body.tools is None:
        return None, _choice(body.tool_choice)
    if body.tools and not any(tool.type in _KNOWN for tool in body.tools):
        message = (
            f"tools of type {body.tools[0].type[:50]!r} are not supported; give functions or custom tools"
        )
        raise ApiError(400, message, "tools.0.type")
    tools = [_function(tool, index) for index, tool in enumerate(body.tools) if tool.type in _KNOWN]
    if hosted := sorted({ascii(tool.type[:50]) for tool in body.tools if tool.type not in _KNOWN}):
        note_warnings([f"tools that a server runs are left out, as there are none here: {', '.join(hosted)}"])
    choice = body.tool_choice
    if isinstance(choice, NamedTool) and choice.type == "allowed_tools":
        given = choice.tools or []
        names = [tool.name for tool in given if tool.name is not None and tool.type in _KNOWN]
        if not names:
            raise ApiError(400, "allowed_tools needs tools: functions or custom tools by name", "tool_choice")
        return allowed_tools(tools, names, "tool_choice"), choice.mode or "auto"
    return tools, _choice(choice)


def custom_names(body: ResponsesRequest) -> frozenset[str]:
    """Returns the names of the custom tools of a request."""
    return frozenset(tool.name for tool in body.tools or () if tool.type == "custom" and tool.name)


def _function(tool: ResponseTool, index: int) -> Tool:
    if tool.name is None:
        raise ApiError(400, f"a {tool.type} tool needs a name", f"tools.{index}.name")
    if tool.type == "function":
        return function_tool(tool.name, tool.description, tool.parameters, tool.strict)
    stand_in = custom_function(tool.name, tool.description, tool.format)
    return function_tool(stand_in["name"], stand_in["description"], stand_in["parameters"])


def _choice(choice: Any) -> Any:
    if choice is None or isinstance(choice, str):
        return choice
    if choice.type not in _KNOWN or choice.name is None:
        message = (
            'tool_choice is none, auto, required, {"type": "function", "name": …}, {"type": "custom", '
            '"name": …} or {"type": "allowed_tools", "tools": […]}'
        )
        raise ApiError(400, message, "tool_choice")
    return chosen_tool(choice.name)
