"""Gemma's calls: ``call:name{key:<|"|>text<|"|>,other:[1,2]}``."""

from __future__ import annotations

import json
import re
from typing import Any

from torch_armllm.chat_format.calls import MarkedCalls
from torch_armllm.chat_format.cursor import Cursor, Markers, Wait
from torch_armllm.chat_format.format import CallFormat
from torch_armllm.chat_format.json_text import json_string
from torch_armllm.chat_format.object_writer import ObjectWriter
from torch_armllm.chat_format.typed_values import ToolSchemas, typed
from torch_armllm.chat_format.writer import Writer

_KEY_ENDS = Markers([":", "}"])
_LITERAL = re.compile(r"[^,}\]]*")
_MOST_NESTED = 100


class BracesCalls(MarkedCalls):
    """Calls in braces, whose keys have no quotes and whose strings are between special tokens."""

    def __init__(self, cursor: Cursor, writer: Writer, tools: ToolSchemas, format: CallFormat) -> None:
        super().__init__(cursor, writer, tools, format)
        self._quotes = Markers([format.quote])

    def call(self, holes: dict[str, str]) -> Wait[bool]:
        """See `MarkedCalls`."""
        name = yield from self.begun(holes)
        if name is None:
            return False
        yield from self._object({"type": "object", "properties": _Properties(self, name)}, 0)
        return True

    def _object(self, schema: Any, depth: int) -> Wait[bool]:
        if not (yield from self.cursor.accept("{")):
            return False
        fields = ObjectWriter(self.writer)
        properties = schema.get("properties") if isinstance(schema, dict) else None
        while True:
            yield from self.cursor.space()
            if (yield from self.cursor.accept("}")):
                fields.end()
                return True
            if not fields.is_empty:
                yield from self.cursor.accept(",")
                yield from self.cursor.space()
            pieces: list[str] = []
            ended = yield from self.cursor.until(_KEY_ENDS, pieces.append)
            if ended is None:
                return False
            if ended == "}" and not "".join(pieces).strip():
                continue
            self.cursor.take(1)
            key = (
                "".join(pieces)
                .strip()
                .removeprefix(self.format.quote)
                .removesuffix(self.format.quote)
                .strip('"')
            )
            fields.key(key)
            if ended == "}":
                self.writer.arguments("null}")
                return True
            inner = properties.get(key) if isinstance(properties, dict | _Properties) else None
            yield from self.cursor.space()
            if not (yield from self._value(inner, depth + 1)):
                return False

    def _array(self, schema: Any, depth: int) -> Wait[bool]:
        self.cursor.take(1)
        self.writer.arguments("[")
        items = schema.get("items") if isinstance(schema, dict) else None
        first = True
        while True:
            yield from self.cursor.space()
            if (yield from self.cursor.accept("]")):
                self.writer.arguments("]")
                return True
            if not (yield from self.cursor.more()):
                return False
            if not first:
                if not (yield from self.cursor.accept(",")):
                    return False
                yield from self.cursor.space()
                self.writer.arguments(", ")
            first = False
            if not (yield from self._value(items, depth + 1)):
                return False

    def _value(self, schema: Any, depth: int) -> Wait[bool]:
        if depth > _MOST_NESTED or not (yield from self.cursor.more()):
            return False
        if (yield from self.cursor.accept(self.format.quote)):
            self.writer.arguments('"')
            if (yield from self.cursor.until(self._quotes, self.writer.quoted, False)) is None:
                return False
            self.cursor.take(len(self.format.quote))
            self.writer.arguments('"')
            return True
        if (yield from self.cursor.follows("{")):
            return (yield from self._object(schema, depth))
        if (yield from self.cursor.follows("[")):
            return (yield from self._array(schema, depth))
        if (yield from self.cursor.follows('"')):
            return (yield from json_string(self.cursor, self.writer.arguments))
        text = yield from self.cursor.matches(_LITERAL)
        if not (yield from self.cursor.more()):
            self.writer.arguments(text.strip())
            return False
        self.writer.arguments(json.dumps(typed(text.strip(), schema), ensure_ascii=False))
        return True


class _Properties:
    """The properties of a tool's arguments."""

    def __init__(self, calls: MarkedCalls, name: str) -> None:
        self._calls, self._name = calls, name

    def get(self, key: str) -> Any:
        """Returns the schema of an argument."""
        return self._calls.tools.argument(self._name, key)
