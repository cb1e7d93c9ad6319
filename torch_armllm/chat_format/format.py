"""The format in which a model writes reasoning, content and tool calls."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

ID, INDEX, TYPE = "\ue000", "\ue001", "\ue002"
"""Holes in a marker: the call's id, a number, and the name of a value's type."""
HOLES = {ID: "{id}", INDEX: "{index}", TYPE: "{type}"}

Kind = Literal["json", "tag_json", "tagged", "python", "braces", "nested"]
"""Syntax of a call.

json: a JSON value holds the name and the arguments.  tag_json: the name is outside of a JSON object of
arguments.  tagged: name, keys and values stand between markers.  python: ``name(key=value)``.
braces: ``call:name{key:value}``.  nested: an element for each key, and within it for each field of its value.
"""
Messages = Literal["", "harmony", "recipients"]
"""Outputs of several messages, each with a header: gpt-oss's channels, and recipients (``to=user``)."""

TAG = r"<[^<>\s]+?>|\[/?(?:[A-Z_]+|[a-z]+\d+)\]"
"""A tag of a chat template: ``<tool_call>``, ``[TOOL_CALLS]``, ``[unused11]``."""
_TOKEN = re.compile(rf"{TAG}|[\ue000-\ue002]|(?:(?!{TAG})[^\s\ue000-\ue002])+")
_BRACKETS, _SAME = re.compile(r"[\[\]{}`,]+"), re.compile(r"`+|.")


def tokens(marker: str) -> tuple[str, ...]:
    """Splits a marker into tags, words and holes; the white space between them is free."""
    parts: list[str] = []
    for part in _TOKEN.findall(marker):
        parts += _SAME.findall(part) if _BRACKETS.fullmatch(part) else [part]
    return tuple(parts)


def readable(marker: str) -> str:
    """Returns a marker with names for its holes."""
    for hole, name in HOLES.items():
        marker = marker.replace(hole, name)
    return marker


@dataclass(frozen=True)
class ReasoningFormat:
    """Markers of reasoning.

    Attributes:
        begin: before it.
        end: after it.
        implied: True if an output begins with reasoning where neither the prompt nor it has ``begin``.
        repeats: True if more of it may follow content.
    """

    begin: str
    end: str
    implied: bool = False
    repeats: bool = False


@dataclass(frozen=True)
class ArgumentFormat:
    """Syntax of the arguments of a tagged call.

    Attributes:
        key_begin: before a key.
        key_end: between a key and its value; may have a hole for the value's type.
        string_type: what stands in that hole if the value is a string.
        other_type: what stands there if it is a number.
        value_end: after a value.
        before: white space of the format before a value.
        after: white space of the format after a value.
        separator: between two arguments.
    """

    key_begin: str
    key_end: str
    value_end: str
    string_type: str | None = None
    other_type: str | None = None
    before: str = ""
    after: str = ""
    separator: str = ""


@dataclass(frozen=True)
class JsonFormat:
    """Fields of a call that is a JSON value.

    Attributes:
        name: field of the tool's name; empty: the name is the key of the arguments.
        arguments: field of the arguments.
        id: field of the call's id; empty: there is none.
        wrapper: field that holds name and arguments; empty: they are in the call itself.
        is_list: True if the calls are in a list.
        layout: a call as the template renders it, from its brace on, with ``name`` and ``{}`` as arguments.
    """

    name: str = "name"
    arguments: str = "arguments"
    id: str = ""
    wrapper: str = ""
    is_list: bool = False
    layout: str = ""


@dataclass(frozen=True)
class CallFormat:
    """Syntax of tool calls.

    Attributes:
        kind: the family of the syntax.
        section_begin: before the first call.
        begin: before each call, up to its name or its JSON value.
        name_end: between the name and the arguments.
        end: after each call.
        separator: between two calls.
        section_end: after the last call.
        json: fields, for ``json``.
        argument: markers of keys and values, for ``tagged``.
        id_around_name: True if the text around the name, from tag to tag, is the call's id.
        parallel: True if a message may hold several calls.
        name_ends: more texts that may be between the name and the arguments.
        openers: more texts that may be before a call in the place of its markers.
        closers: more texts that may follow a call, and mean nothing.
        raw_argument: True if text in the place of a JSON object is the tool's only argument.
        quote: on both sides of a string, for ``braces``.
        takes_code: True if models write code for a tool that runs it behind ``<|python_tag|>``.
    """

    kind: Kind
    section_begin: str = ""
    begin: str = ""
    name_end: str = ""
    end: str = ""
    separator: str = ""
    section_end: str = ""
    json: JsonFormat = field(default_factory=JsonFormat)
    argument: ArgumentFormat | None = None
    id_around_name: bool = False
    parallel: bool = True
    name_ends: tuple[str, ...] = ()
    openers: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()
    raw_argument: bool = False
    quote: str = ""
    takes_code: bool = False

    @cached_property
    def opening(self) -> tuple[str, ...]:
        """The tokens before the first call's name or JSON value."""
        return tokens(self.section_begin) + tokens(self.begin)

    @property
    def is_bare(self) -> bool:
        """True if nothing but the bracket of a list is before the first call."""
        return set(self.opening) <= {"["}

    @cached_property
    def closing(self) -> tuple[tuple[str, ...], ...]:
        """Markers that may follow a call: each tag alone, or as a whole where a part means something else."""
        found: set[tuple[str, ...]] = set()
        for text in (self.end, self.section_end, *self.closers):
            parts = tokens(text)
            if any(part[0].isalnum() or part in self.opening for part in parts):
                found.add(parts)
            else:
                found |= {(part,) for part in parts if part not in HOLES}
        return tuple(sorted(found - {()}, key=lambda parts: (-len(parts), parts)))


@dataclass(frozen=True)
class ChatFormat:
    """Format of a model's messages: reasoning, content and tool calls.

    Attributes:
        source: ``derived``, or the name of a format that is written down.
        reasoning: markers of reasoning; None: there is none.
        calls: markers of tool calls; None: they are not known.
        header: what the template writes before a message of the assistant.
        content_begin: before the content.
        content_end: after the content, where a message can go on.
        turn_end: after the message.
        messages: how the messages of one output are told apart; empty: it is one message.
        begun: text of the prompt's end that the parser reads before the output.
    """

    source: str = "derived"
    reasoning: ReasoningFormat | None = None
    calls: CallFormat | None = None
    header: str = ""
    content_begin: str = ""
    content_end: str = ""
    turn_end: str = ""
    messages: Messages = ""
    begun: str = ""
