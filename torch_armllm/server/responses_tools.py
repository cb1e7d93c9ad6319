"""Tools of requests of `/v1/responses`: functions, custom tools, which take texts, and namespaces of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch_armllm.server.chat_parts import chosen_tool, function_tool
from torch_armllm.server.custom_tools import custom_function
from torch_armllm.server.errors import ApiError
from torch_armllm.server.middleware.warnings import note_warnings
from torch_armllm.server.protocol.chat import Tool, allowed_tools
from torch_armllm.server.protocol.responses import NamedTool, ResponsesRequest, ResponseTool

_CALLED = ("function", "custom")
_KNOWN = (*_CALLED, "namespace")


@dataclass(frozen=True)
class ClientTool:
    """A tool that the client runs.

    Attributes:
        tool: the tool.
        param: the request's field that gives it.
        namespace: that it is in; None: it is in none.
        about: description of the namespace, with its first tool alone.
    """

    tool: ResponseTool
    param: str
    namespace: str | None = None
    about: str = ""

    @property
    def is_custom(self) -> bool:
        """True if the tool takes a text."""
        return self.tool.type == "custom"

    def named(self) -> dict[str, str]:
        """Returns the fields of a call that name the tool."""
        space = {} if self.namespace is None else {"namespace": self.namespace}
        return {"name": self.tool.name or "", **space}


def name_in(namespace: str | None, name: str) -> str:
    """Returns the name by which the model knows a tool, which templates and parsers take as one word.

    Args:
        namespace: of the tool; None: it is in none.
        name: within the namespace.
    """
    return name if not namespace else f"{namespace.removesuffix('__')}__{name}"


def client_tools(body: ResponsesRequest) -> dict[str, ClientTool]:
    """Returns the tools of a request that the client runs, by the name that the model knows.

    Raises:
        ApiError: a tool has no name, a namespace holds something else than functions and custom tools, or
            two tools have the same name for the model.
    """
    known: dict[str, ClientTool] = {}
    for given in _each(body.tools or ()):
        name = name_in(given.namespace, given.named()["name"])
        if name in known:
            message = f"two tools are {name[:200]!r} to the model; rename one of them or its namespace"
            raise ApiError(400, message, given.param)
        known[name] = given
    return known


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
            f"tools of type {body.tools[0].type[:50]!r} are not supported; give functions, custom tools or "
            "namespaces of them"
        )
        raise ApiError(400, message, "tools.0.type")
    known = client_tools(body)
    tools = [_function(name, given) for name, given in known.items()]
    if hosted := sorted({ascii(tool.type[:50]) for tool in body.tools if tool.type not in _KNOWN}):
        note_warnings([f"tools that a server runs are left out, as there are none here: {', '.join(hosted)}"])
    choice = body.tool_choice
    if isinstance(choice, NamedTool) and choice.type == "allowed_tools":
        names = list(_allowed(choice.tools or [], known))
        if not names:
            raise ApiError(400, "allowed_tools needs tools: functions or custom tools by name", "tool_choice")
        return allowed_tools(tools, names, "tool_choice"), choice.mode or "auto"
    return tools, _choice(choice)


def _each(tools: Any) -> Iterator[ClientTool]:
    """Yields the tools that the client runs, those of namespaces too."""
    for index, tool in enumerate(tools):
        param = f"tools.{index}"
        if tool.type in _KNOWN and not tool.name:
            raise ApiError(400, f"a {tool.type} needs a name", f"{param}.name")
        if tool.type in _CALLED:
            yield ClientTool(tool, param)
        elif tool.type == "namespace":
            for inner, part in enumerate(tool.tools or ()):
                place = f"{param}.tools.{inner}"
                if part.type not in _CALLED:
                    message = f"a namespace holds functions and custom tools, not {part.type[:50]!r}"
                    raise ApiError(400, message, f"{place}.type")
                if not part.name:
                    raise ApiError(400, f"a {part.type} needs a name", f"{place}.name")
                yield ClientTool(part, place, tool.name, (tool.description or "") if inner == 0 else "")


def _function(name: str, given: ClientTool) -> Tool:
    tool, description = given.tool, given.tool.description
    if given.about:
        description = f"{description or ''}\n\nAbout {given.namespace}: {given.about}".strip()
    if not given.is_custom:
        return function_tool(name, description, tool.parameters, tool.strict)
    stand_in = custom_function(name, description, tool.format)
    return function_tool(stand_in["name"], stand_in["description"], stand_in["parameters"])


def _allowed(tools: list[NamedTool], known: Mapping[str, ClientTool]) -> Iterator[str]:
    """Yields the names of allowed tools; a namespace allows all of its tools."""
    for tool in tools:
        if tool.type == "namespace":
            yield from (name for name, given in known.items() if given.namespace == tool.name)
        elif tool.type in _CALLED and tool.name is not None:
            yield name_in(tool.namespace, tool.name)


def _choice(choice: Any) -> Any:
    if choice is None or isinstance(choice, str):
        return choice
    if choice.type not in _CALLED or choice.name is None:
        message = (
            'tool_choice is none, auto, required, {"type": "function", "name": …}, {"type": "custom", '
            '"name": …} or {"type": "allowed_tools", "tools": […]}'
        )
        raise ApiError(400, message, "tool_choice")
    return chosen_tool(name_in(choice.namespace, choice.name))
