"""Calls of nested elements: ``<invoke name="f"><key><item>1</item></key></invoke>``."""

from __future__ import annotations

import json
import re
from typing import Any

from torch_armllm.chat_format.calls import MarkedCalls
from torch_armllm.chat_format.cursor import MOST_SPACE, Cursor, Markers, Wait
from torch_armllm.chat_format.format import CallFormat
from torch_armllm.chat_format.object_writer import ObjectWriter
from torch_armllm.chat_format.typed_values import ToolSchemas, is_text, typed, types
from torch_armllm.chat_format.writer import Writer

_KEY = re.compile(r"[^<>/\s]*")
_MOST_OF_KEY = 1000
_MOST_NESTED = 100
_ITEM = "item"


class NestedCalls(MarkedCalls):
    """Calls of elements: an object's have its keys as names, those of a list are called ``item``."""

    def __init__(self, cursor: Cursor, writer: Writer, tools: ToolSchemas, format: CallFormat) -> None:
        super().__init__(cursor, writer, tools, format)
        assert format.argument is not None
        self._prefix = format.argument.key_begin.removesuffix("<")
        self._tags = Markers([self._prefix + "<"])

    def call(self, holes: dict[str, str]) -> Wait[bool]:
        """See `MarkedCalls`."""
        name = yield from self.begun(holes)
        if name is None:
            return False
        fields = ObjectWriter(self.writer)
        while True:
            key = yield from self._open()
            if key is None:
                break
            fields.key(key)
            schema = self.tools.argument(name, key)
            if is_text(schema):
                if not (yield from self._text(key)):
                    return True
                continue
            value, whole = yield from self._element(key, schema, 0)
            if not whole:
                return True
            self.writer.arguments(json.dumps(value, ensure_ascii=False))
        if (yield from self.ends_whole()):
            fields.end()
        return True

    def _open(self) -> Wait[str | None]:
        """Reads a tag that opens an element, and returns its name."""
        self.cursor.mark()
        yield from self.cursor.space(MOST_SPACE)
        if (yield from self.cursor.accept(self._prefix + "<")):
            key = yield from self.cursor.matches(_KEY, _MOST_OF_KEY)
            if key and (yield from self.cursor.accept(">")):
                self.cursor.forget()
                return key
        self.cursor.back()
        return None

    def _text(self, key: str) -> Wait[bool]:
        """Reads a string; returns False if the text ends within it."""
        self.writer.arguments('"')
        end = f"{self._prefix}</{key}>"
        if (yield from self.cursor.until(Markers([end]), self.writer.quoted, False)) is None:
            return False
        self.cursor.take(len(end))
        self.writer.arguments('"')
        return True

    def _element(self, key: str, schema: Any, depth: int) -> Wait[tuple[Any, bool]]:
        """Reads an element's value up to its end; the second result is False if the text ends before."""
        pieces: list[str] = []
        children: list[tuple[str, Any]] = []
        end = f"{self._prefix}</{key}>"
        while True:
            if (yield from self.cursor.until(self._tags, pieces.append)) is None:
                return None, False
            if (yield from self.cursor.accept(end)):
                break
            child = (yield from self._open()) if depth < _MOST_NESTED else None
            if child is None:
                pieces.append(self.cursor.take(len(self._prefix) + 1))
                continue
            value, whole = yield from self._element(child, _child(schema, child), depth + 1)
            if not whole:
                return None, False
            children.append((child, value))
        allowed = types(schema)
        if children:
            is_list = all(name == _ITEM for name, _ in children) and (not allowed or "array" in allowed)
            return [value for _, value in children] if is_list else dict(children), True
        text = "".join(pieces)
        if not text.strip() and allowed and "string" not in allowed:
            return ([] if "array" in allowed else {} if "object" in allowed else None), True
        return typed(text, schema), True


def _child(schema: Any, name: str) -> Any:
    """Returns the schema of an element within another; None if it is not known."""
    if not isinstance(schema, dict):
        return None
    options = [schema]
    for field in ("anyOf", "oneOf", "allOf"):
        options += [part for part in schema.get(field) or () if isinstance(part, dict)]
    for option in options:
        properties = option.get("properties")
        if isinstance(properties, dict) and isinstance(properties.get(name), dict):
            return properties[name]
        if name == _ITEM and isinstance(option.get("items"), dict):
            return option["items"]
    return None
