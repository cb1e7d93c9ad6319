"""Calls that are JSON: ``{"name": …, "arguments": …}``, alone, in a list, or after a tag."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress

from torch_armllm.chat_format.calls import MarkedCalls
from torch_armllm.chat_format.cursor import MOST_SPACE, Cursor, Markers, Wait
from torch_armllm.chat_format.format import CallFormat
from torch_armllm.chat_format.json_text import json_string, json_value
from torch_armllm.chat_format.typed_values import ToolSchemas
from torch_armllm.chat_format.writer import Writer

_ARGUMENTS = frozenset({"arguments", "parameters"})
_FENCES = ("```json", "```xml", "```")
_TAGS = tuple(
    f"<{name}>" for name in ("tool_call", "function_call", "tools", "tool", "response", "json", "xml")
)
"""Tags that models put around a call in the place of those of their template."""
_FUNCTION = "function"
_MOST_NESTED = 4
_NAMES = ("name", _FUNCTION)
"""Fields that models write in the place of those of their template."""


class JsonCalls(MarkedCalls):
    """Calls whose names are in the JSON.

    Models forget the markers of their format: JSON that begins the content, in a code fence or without one,
    is a call, too, if its first field is the name of a tool; likewise JSON in other tags, wherever it is.

    Attributes:
        is_unmarked: True if a call that is read has no markers.
    """

    is_unmarked = False
    _fenced = False
    _tag = ""

    def __init__(self, cursor: Cursor, writer: Writer, tools: ToolSchemas, format: CallFormat) -> None:
        super().__init__(cursor, writer, tools, format)
        if format.opening[-1:] == ("[",) and not format.is_bare:
            self._openers.append(format.opening[:-1])

    def find_triggers(self) -> frozenset[str]:
        """See `MarkedCalls`; a call without markers begins with its brace."""
        return (
            frozenset("{[") if self.format.is_bare else super().find_triggers() | {"{", "[", *_FENCES, *_TAGS}
        )

    def _attempt(self) -> Wait[bool]:
        self.is_unmarked = self.format.is_bare
        if (yield from super()._attempt()):
            return True
        is_bare, takes_other_tags = self.format.is_bare, "<tools>" in self.triggers
        begins = is_bare or self.writer.num_calls > 0 or (takes_other_tags and not self.writer.has_content)
        if not begins and not takes_other_tags:
            return False
        self.is_unmarked |= not self.writer.num_calls
        self.cursor.mark()
        fence = "" if is_bare else (yield from self._accepts(_FENCES))
        tag = (yield from self._accepts(_TAGS)) if takes_other_tags else ""
        if (begins or tag) and (yield from self.call({})):
            self._fenced, self._tag = self._fenced or bool(fence), tag or self._tag
            return True
        self.cursor.back()
        return False

    def _accepts(self, texts: Sequence[str]) -> Wait[str]:
        """Reads one of several texts and white space; returns the text, or an empty one."""
        for text in texts:
            if (yield from self.cursor.accept(text)):
                yield from self.cursor.space(MOST_SPACE)
                return text
        return ""

    def _closes(self) -> Wait[bool]:
        if (yield from super()._closes()):
            return True
        if self._tag and (yield from self.cursor.accept(f"</{self._tag[1:]}")):
            self._tag = ""
            return True
        if self._fenced and (yield from self.cursor.accept("```")):
            self._fenced = False
            return True
        return False

    def call(self, holes: dict[str, str]) -> Wait[bool]:
        """See `MarkedCalls`."""
        if not self.format.is_bare and not self.format.name_end and not (yield from self._is_json()):
            return (yield from self._named(holes))
        is_list = yield from self.cursor.accept("[")
        yield from self.cursor.space(MOST_SPACE)
        if not (yield from _Object(self).read()):
            return False
        if is_list:
            self.writer.end_call(self.cursor.place)
        while is_list:
            yield from self.cursor.space(MOST_SPACE)
            if (yield from self.cursor.accept("]")):
                break
            self.cursor.mark()
            yield from self.cursor.accept(",")
            yield from self.cursor.space(MOST_SPACE)
            if not (yield from _Object(self).read()):
                self.cursor.back()
                break
        return True

    def _is_json(self) -> Wait[bool]:
        return (yield from self.cursor.follows("{")) or (yield from self.cursor.follows("["))

    def _named(self, holes: dict[str, str]) -> Wait[bool]:
        """Reads a call whose name a model has written before the JSON of its arguments."""
        found = yield from self.name()
        if found is None or not (yield from self.cursor.follows("{")):
            return False
        self.begin(found[0], self.call_id(found[0], holes, found[1]))
        yield from arguments(self)
        return True


class TagJsonCalls(JsonCalls):
    """Calls whose names are outside of a JSON object: ``[TOOL_CALLS]name[ARGS]{…}``."""

    def __init__(self, cursor: Cursor, writer: Writer, tools: ToolSchemas, format: CallFormat) -> None:
        super().__init__(cursor, writer, tools, format)
        if () not in self._name_ends:  # a brace ends a name, too
            self._name_ends.append(())

    def find_triggers(self) -> frozenset[str]:
        """See `MarkedCalls`; a call without markers begins with its name."""
        return super().find_triggers() if self.format.opening else frozenset(self.tools.names)

    def _attempt(self) -> Wait[bool]:
        if self.format.opening or self.writer.begins_line():
            return (yield from super()._attempt())
        return (yield from MarkedCalls._attempt(self))  # a name within a line is a word

    def call(self, holes: dict[str, str]) -> Wait[bool]:
        """See `MarkedCalls`."""
        found = yield from self.name()
        if found is None:
            return (yield from super().call(holes))
        name, after = found
        yield from self.cursor.space(MOST_SPACE)
        if (yield from self.cursor.more()) and self.cursor.available(1) not in '{"n':
            if not self.format.raw_argument:
                return False
            self.begin(name, self.call_id(name, holes, after))
            yield from self._raw(name)
            return True
        self.begin(name, self.call_id(name, holes, after))
        yield from arguments(self)
        return True

    def _raw(self, name: str) -> Wait[None]:
        """Reads a tool's only argument, which is written as it is, such as code."""
        key = next(iter(self.tools.keys(name)), "code")
        value: list[str] = []
        yield from self.cursor.until(Markers([self.format.begin]), value.append)
        self.writer.arguments(json.dumps({key: "".join(value).rstrip()}, ensure_ascii=False))


class _Object:
    """One call in JSON; its fields come in any order."""

    def __init__(self, calls: JsonCalls) -> None:
        self._calls, self._cursor, self._writer = calls, calls.cursor, calls.writer
        self._json = calls.format.json
        self._name: str | None = None
        self._id: str | None = None
        self._early: list[str] | None = None  # arguments that came before the name
        self._has_arguments = False
        self._recording = False
        self._depth = 0

    def read(self) -> Wait[bool]:
        """Reads the object; returns False if it is no call."""
        if not (yield from self._cursor.follows("{")):
            return False
        whole = yield from self._fields()
        if self._name is not None:
            if self._recording:
                self._cursor.recorded()
            if whole:
                yield from self._excess()
            return True
        if self._recording:  # too long to be read again: it is text
            self._writer.content(self._cursor.recorded())
            return True
        return False

    def _excess(self) -> Wait[None]:
        """Reads braces that a model writes behind those of the object."""
        while True:
            self._cursor.mark()
            yield from self._cursor.space(MOST_SPACE)
            if not (yield from self._cursor.accept("}")):
                self._cursor.back()
                return
            self._cursor.forget()

    def _fields(self) -> Wait[bool]:
        """Reads an object's fields; returns False where it is no call, or the text ends."""
        self._cursor.take(1)
        while True:
            yield from self._cursor.space(MOST_SPACE)
            if (yield from self._cursor.accept("}")):
                if self._name is not None and not self._has_arguments:
                    self._has_arguments = True
                    self._writer.arguments("{}")
                return True
            if not (yield from self._quoted()):
                return False
            pieces: list[str] = []
            if not (yield from json_string(self._cursor, pieces.append)):
                return False
            yield from self._cursor.space(MOST_SPACE)
            if not (yield from self._cursor.accept(":")):
                return False
            yield from self._cursor.space(MOST_SPACE)
            if not (yield from self._field(_text("".join(pieces)))):
                return False
            yield from self._cursor.space(MOST_SPACE)
            yield from self._cursor.accept(",")

    def _quoted(self) -> Wait[bool]:
        """True if a string of JSON or Python follows."""
        return (yield from self._cursor.follows('"')) or (yield from self._cursor.follows("'"))

    def _field(self, key: str) -> Wait[bool]:
        """Reads a field's value; returns False where this is no call, or the text ends."""
        json = self._json
        if not json.name and self._name is None:
            if key not in self._calls.tools:
                return False
            self._begin(key)
            self._has_arguments = True
            return (yield from arguments(self._calls))
        if key in (json.wrapper, _FUNCTION) and (yield from self._cursor.follows("{")):
            self._depth += 1
            return self._depth < _MOST_NESTED and (yield from self._fields())
        if key in (json.name, *_NAMES) and self._name is None:
            pieces: list[str] = []
            if not (yield from self._quoted()):
                return False
            ended = not (yield from json_string(self._cursor, pieces.append))
            name = _text("".join(pieces))
            if ended or name not in self._calls.tools:
                return False
            self._begin(name)
            return True
        if (key == json.arguments or key in _ARGUMENTS) and not self._has_arguments:
            if self._name is None and self._calls.is_unmarked:
                return False  # a call without markers begins with its name
            self._has_arguments = True
            if self._name is not None:
                return (yield from arguments(self._calls))
            self._keep()
            self._early = []
            return (yield from json_value(self._cursor, self._early.append))
        if self._name is None and self._calls.is_unmarked and key not in ("id", "type", json.id):
            return False
        value: list[str] = []
        if self._name is None:
            self._keep()
        whole = yield from json_value(self._cursor, value.append)
        if key in (json.id, "id") and self._id is None:
            self._id = _text("".join(value)) or None
        return whole

    def _keep(self) -> None:
        """Gives up the mark before a value of any length."""
        if not self._recording:
            self._recording = True
            self._cursor.record_from_mark()
            self._cursor.forget()

    def _begin(self, name: str) -> None:
        self._name = name
        if not self._recording:
            self._cursor.forget()
        self._writer.begin_call(name, self._id)
        if self._early is not None:
            self._writer.arguments(_object_text("".join(self._early)))


def arguments(calls: MarkedCalls) -> Wait[bool]:
    """Reads arguments in JSON; returns False if the text ends within them.

    Models also write them as a string of JSON, or ``null``.
    """
    cursor, writer = calls.cursor, calls.writer
    if (yield from cursor.follows("{")):
        return (yield from json_value(cursor, writer.arguments))
    pieces: list[str] = []
    whole = yield from json_value(cursor, pieces.append)
    writer.arguments(_object_text("".join(pieces), whole))
    return whole


def _object_text(text: str, whole: bool = True) -> str:
    """Returns the text of an object that may be in a string, or null."""
    if text.startswith('"'):
        return _text(text if whole else text + '"')
    return "{}" if whole and text.strip() in ("", "null") else text


def _text(quoted: str) -> str:
    """Returns what a JSON string says; empty if it is none."""
    with suppress(ValueError):
        value = json.loads(quoted, strict=False)
        return value if isinstance(value, str) else str(value)
    return ""
