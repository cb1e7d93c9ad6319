"""Traits of a chat template: the parts of a conversation that it takes and shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch_armllm.chat_format.format import CallFormat

Message = dict[str, Any]
ROLES = ("user", "assistant", "system", "tool")
EMPTY: tuple[str | None, ...] = ("", None)
"""Contents of a message that only calls; None: the message has no content."""

ArgumentForm = Literal["object", "text"]
ReasoningField = Literal["reasoning_content", "thinking", "part"]


@dataclass(frozen=True)
class ReasoningMarks:
    """Texts around the reasoning of a message, as a template or a model writes them.

    Attributes:
        begin: before the reasoning.
        end: between the reasoning and the content.
    """

    begin: str
    end: str


@dataclass(frozen=True)
class TemplateTraits:
    """Traits of a chat template; the defaults are those of a template that shows everything.

    Attributes:
        variables: that it cannot do without, with their values; an empty one stands for today's date.
        tools_variable: that shows the tools; None: none does.
        tools_as_text: True if that variable is a text.
        needs_tool_list: True if a conversation without tools needs an empty list of them.
        needs_description: True if it refuses a tool without a description.
        needs_details: True if it refuses a parameter without a description.
        needs_parameters: True if it refuses a tool without parameters.
        shows_system: True if it shows a system message.
        shows_systems: True if it shows each of two system messages at the beginning.
        shows_late_system: True if it shows a system message between others.
        knows_developer: True if it shows a developer's message, and not as one of any role.
        part_roles: whose contents may be lists of parts.
        text_roles: whose contents may be texts.
        repeats: roles that may follow themselves.
        user_after_result: True if a user's message may follow the result of a call.
        shows_calls: True if it shows the calls of a message.
        calls: format in which a model writes calls that its template does not show; None: it is not known.
        arguments: form of a call's arguments.
        raw_arguments: True if arguments that are a text are shown as they are.
        empty_contents: contents of a message that only calls, the ones that do no harm.
        calls_beside_content: True if it shows the calls of a message that has a content, too.
        several_calls: True if it shows several calls of a message.
        short_ids: True if ids of calls have to be nine letters and digits.
        shows_results: True if it shows the results of calls.
        positional_results: True if nothing but their order tells which result is of which call.
        reasoning: field of a message whose reasoning it shows, or a part of the content; None: none.
        reasoning_beside_calls: True if content, reasoning and calls may be in one message.
        marks: of the reasoning; None if they are not known.
        switches: variables that a request may set.
    """

    variables: tuple[tuple[str, str], ...] = ()
    tools_variable: str | None = "tools"
    tools_as_text: bool = False
    needs_tool_list: bool = False
    needs_description: bool = False
    needs_details: bool = False
    needs_parameters: bool = False
    shows_system: bool = True
    shows_systems: bool = True
    shows_late_system: bool = True
    knows_developer: bool = False
    part_roles: frozenset[str] = frozenset()
    text_roles: frozenset[str] = frozenset(ROLES)
    repeats: frozenset[str] = frozenset(("user", "assistant"))
    user_after_result: bool = True
    shows_calls: bool = True
    calls: CallFormat | None = None
    arguments: ArgumentForm = "object"
    raw_arguments: bool = False
    empty_contents: tuple[str | None, ...] = EMPTY
    calls_beside_content: bool = True
    several_calls: bool = True
    short_ids: bool = False
    shows_results: bool = True
    positional_results: bool = False
    reasoning: ReasoningField | None = "reasoning_content"
    reasoning_beside_calls: bool = True
    marks: ReasoningMarks | None = None
    switches: tuple[str, ...] = ()


def with_reasoning(message: Message, reasoning: str, field: ReasoningField | None) -> Message:
    """Returns a message with its reasoning where a template reads it."""
    if field is None:
        return message
    if field == "reasoning_content":
        return {**message, field: reasoning, "reasoning": reasoning}  # templates read either
    if field != "part":
        return {**message, field: reasoning}
    content = message.get("content") or []
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {**message, "content": [{"type": "thinking", "thinking": reasoning}, *parts]}
