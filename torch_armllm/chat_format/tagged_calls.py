"""Calls whose keys and values stand between tags: ``<function=f><parameter=k>v</parameter></function>``."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from torch_armllm.chat_format.calls import MarkedCalls
from torch_armllm.chat_format.cursor import MOST_SPACE, Cursor, Markers, Wait
from torch_armllm.chat_format.format import TYPE, ArgumentFormat, CallFormat, tokens
from torch_armllm.chat_format.object_writer import ObjectWriter
from torch_armllm.chat_format.typed_values import ToolSchemas, is_text, typed, types
from torch_armllm.chat_format.writer import Writer


class TaggedCalls(MarkedCalls):
    """Calls of markers alone; strings are written as they are, and stream."""

    def __init__(self, cursor: Cursor, writer: Writer, tools: ToolSchemas, format: CallFormat) -> None:
        super().__init__(cursor, writer, tools, format)
        assert format.argument is not None
        self._argument: ArgumentFormat = format.argument
        self._key_begin, self._key_end = tokens(self._argument.key_begin), tokens(self._argument.key_end)
        self._key_ends = Markers([self._key_end[0]])
        self._value_end = self._argument.value_end.strip()
        self._value_ends = Markers([self._value_end])

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
        fields = ObjectWriter(self.writer)
        while True:
            key = yield from self._key()
            if key is None:
                break
            fields.key(key[0])
            if not (yield from self._value(self.tools.argument(name, key[0]), key[1])):
                return True  # cut off
        if (yield from self.ends_whole()):
            fields.end()
        return True

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
        ended = yield from self.cursor.until(self._key_ends, pieces.append)
        if ended is None:
            return None
        holes = yield from self.pieces(self._key_end)
        return None if holes is None else ("".join(pieces).strip(), holes.get(TYPE))

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
            ended = yield from self.cursor.until(self._value_ends, value.add, False)
            value.end()
            text = "".join(pieces)
            if ended is None:
                self.writer.arguments(text.strip() if "string" not in known else "")
                return False
            self.writer.arguments(json.dumps(typed(text, schema), ensure_ascii=False))
        else:
            self.writer.arguments('"')
            value.emit = self.writer.quoted
            ended = yield from self.cursor.until(self._value_ends, value.add, False)
            if ended is None:
                return False
            value.end()
            self.writer.arguments('"')
        self.cursor.take(len(self._value_end))
        return True


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
