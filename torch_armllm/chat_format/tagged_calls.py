"""Calls whose keys and values stand between tags: ``<function=f><parameter=k>v</parameter></function>``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from torch_armllm.chat_format.calls import MarkedCalls
from torch_armllm.chat_format.cursor import MOST_SPACE, Cursor, Markers, Wait
from torch_armllm.chat_format.format import TYPE, ArgumentFormat, CallFormat, tokens
from torch_armllm.chat_format.json_calls import arguments
from torch_armllm.chat_format.object_writer import ObjectWriter
from torch_armllm.chat_format.typed_values import ToolSchemas, is_text, typed, types
from torch_armllm.chat_format.writer import Writer

_TYPED = re.compile(rf"\s+\w+=\"{TYPE}\"")
"""The attribute of a value's type."""
_KEY = re.compile(r"[^<>\"']*")
_MOST_OF_KEY = 1000


class TaggedCalls(MarkedCalls):
    """Calls of markers alone; strings are written as they are, and stream."""

    def __init__(self, cursor: Cursor, writer: Writer, tools: ToolSchemas, format: CallFormat) -> None:
        super().__init__(cursor, writer, tools, format)
        assert format.argument is not None
        self._argument: ArgumentFormat = format.argument
        self._key_begin, self._key_end = tokens(self._argument.key_begin), tokens(self._argument.key_end)
        self._key_ends = {
            quote: Markers([self._key_end[0].replace('"', quote) or ">"]) for quote in ('"', "'", "")
        }
        self._untyped_end = tokens(_TYPED.sub("", self._argument.key_end))
        self._value_end = self._argument.value_end.strip()
        self._ending = tokens(format.end) + tokens(format.section_end)
        self._value_ends = Markers({self._value_end, self._key_begin[0], *self._ending[:1]})
        self._names_types = self._untyped_end != self._key_end
        self._missing: set[str] = set()  # arguments that the call does not have yet

    def ends_name(self) -> Wait[bool]:
        """See `MarkedCalls`: an argument or the end of the call."""
        for parts in (self._key_begin, *self.format.closing):
            if (yield from self.cursor.follows(parts[0])):
                return True
        return False

    def call(self, holes: dict[str, str]) -> Wait[bool]:
        """See `MarkedCalls`."""
        name = yield from self.begun(holes)
        if name is None:
            return False
        if (yield from self._is_json()):
            yield from arguments(self)
            return True
        fields = ObjectWriter(self.writer)
        self._missing = set(self.tools.keys(name))
        while True:
            key = yield from self._key()
            if key is None:
                break
            fields.key(key[0])
            self._missing.discard(key[0])
            if not (yield from self._value(self.tools.argument(name, key[0]), key[1])):
                return True  # cut off
        if (yield from self.ends_whole()):
            fields.end()
        return True

    def _is_json(self) -> Wait[bool]:
        """True if a model writes JSON in the place of keys and values."""
        self.cursor.mark()
        yield from self.cursor.space(MOST_SPACE)
        if (yield from self.cursor.follows("{")):
            self.cursor.forget()
            return True
        self.cursor.back()
        return False

    def _key(self) -> Wait[tuple[str, str | None] | None]:
        """Reads a key; returns it with the type that the model has written, or None if there is none."""
        self.cursor.mark()
        yield from self.cursor.space(MOST_SPACE)
        yield from self.cursor.accept(self._argument.separator.strip() or ",")
        yield from self.cursor.space(MOST_SPACE)
        if (yield from self.pieces(self._key_begin)) is None:
            self.cursor.back()
            return None
        self.cursor.forget()
        pieces: list[str] = []
        ended = yield from self.cursor.until(self._key_ends[self.quote], pieces.append)
        if ended is None:
            return None
        self.cursor.mark()
        holes = yield from self.pieces(self._key_end)
        if holes is None and self._names_types:
            self.cursor.back()
            self.cursor.mark()
            holes = yield from self.pieces(self._untyped_end)
        self.cursor.forget()
        return None if holes is None else ("".join(pieces).strip().strip("\"'"), holes.get(TYPE))

    def _value(self, schema: Any, written: str | None) -> Wait[bool]:
        """Reads a value up to its end; returns False if the text ends before."""
        known = types(schema)
        is_string = is_text(schema)
        if written is not None and self._argument.string_type is not None:
            is_string = is_string or (
                written == self._argument.string_type and (not known or "string" in known)
            )
        value = _Value(self._argument.before, self._argument.after)
        if not is_string:
            pieces: list[str] = []
            value.emit = pieces.append
            ended = yield from self._until_value_ends(value)
            value.end()
            text = "".join(pieces)
            if ended is None:
                self.writer.arguments(text.strip() if "string" not in known else "")
                return False
            self.writer.arguments(json.dumps(typed(text, schema), ensure_ascii=False))
        else:
            self.writer.arguments('"')
            value.emit = self.writer.quoted
            ended = yield from self._until_value_ends(value)
            if ended is None:
                return False
            value.end()
            self.writer.arguments('"')
        if ended == self._value_end:
            self.cursor.take(len(ended))
        return True

    def _until_value_ends(self, value: _Value) -> Wait[str | None]:
        """Reads a value up to what ends it; None at the end of the text.

        Models forget that end: the next argument of the tool, or the end of the whole output, is it.
        """
        while True:
            marker = yield from self.cursor.until(self._value_ends, value.add, False)
            if marker is None or marker == self._value_end:
                return marker
            self.cursor.mark()
            ends = (yield from self._begins_argument()) or (yield from self._ends_output())
            self.cursor.back()
            if ends:
                return marker
            value.add(self.cursor.take(len(marker)))

    def _begins_argument(self) -> Wait[bool]:
        """True if an argument follows that the tool has, and the call does not have yet."""
        self.cursor.mark()
        key = ""
        if (yield from self.pieces(self._key_begin)) is not None:
            key = yield from self.cursor.matches(_KEY, _MOST_OF_KEY)
        self.cursor.back()
        return key.strip() in self._missing

    def _ends_output(self) -> Wait[bool]:
        """True if the ends of the call and of the calls follow, and nothing else."""
        if not self._ending or (yield from self.pieces(self._ending)) is None:
            return False
        yield from self.cursor.space(MOST_SPACE)
        return not (yield from self.cursor.more())


class _Value:
    """Drops the line breaks that a format puts around values."""

    def __init__(self, before: str, after: str) -> None:
        self._before = before.endswith("\n")
        self._after = after.startswith("\n")
        self._held = ""
        self.emit: Callable[[str], object] = str

    def add(self, text: str) -> None:
        """Adds a piece, which is not empty."""
        if self._before:
            self._before = False
            text = text.removeprefix("\n")
        text = self._held + text
        self._held = ""
        if self._after and text.endswith("\n"):
            text, self._held = text[:-1], "\n"
        if text:
            self.emit(text)

    def end(self) -> None:
        """Drops what the format puts behind the value."""
        self._held = ""
