"""Calls in Python: ``[name(key=value), …]``."""

from __future__ import annotations

import json
import re
from contextlib import suppress

from torch_armllm.chat_format.calls import MarkedCalls
from torch_armllm.chat_format.cursor import MOST_SPACE, Wait
from torch_armllm.chat_format.object_writer import ObjectWriter
from torch_armllm.chat_format.typed_values import is_text, python_value, typed, types

_OUTSIDE = re.compile(r"[^\"'(){}\[\],]*")
_IDENTIFIER = re.compile(r"\w*")
_IN_STRING = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
_LINE_ENDS = str.maketrans({"\n": "\\n", "\r": "\\r"})
"""Escapes of line ends, which templates write as they are between quotes."""
_BEHIND_VALUE, _BEHIND_PART = ",)\"'", ",)]}:\"'"
"""Characters behind a string that is a value, or lies in one; a quote with others behind it belongs to the
string, whose author did not escape it."""
_MOST_OF_KEY = 200


class PythonCalls(MarkedCalls):
    """Calls in Python; values are literals, read by `ast`."""

    def find_triggers(self) -> frozenset[str]:
        """See `MarkedCalls`; the list itself begins a call where its marker is left out."""
        return super().find_triggers() | {"["}

    def _attempt(self) -> Wait[bool]:
        if (yield from super()._attempt()):
            return True
        if not self.writer.num_calls and not (yield from self.cursor.follows("[")):
            return False
        self.cursor.mark()
        if (yield from self.cursor.accept("[")):
            yield from self.cursor.space(MOST_SPACE)
        if (yield from self.call({})):
            return True
        self.cursor.back()
        return False

    def ends_name(self) -> Wait[bool]:
        """See `MarkedCalls`."""
        return (yield from self.cursor.accept("("))

    def call(self, holes: dict[str, str]) -> Wait[bool]:
        """See `MarkedCalls`."""
        name = yield from self.begun(holes)
        if name is None:
            return False
        keys = list(self.tools.keys(name))
        fields = ObjectWriter(self.writer)
        while True:
            yield from self.cursor.space()
            if (yield from self.cursor.accept(")")):
                fields.end()
                return True
            if not (yield from self.cursor.more()):
                return True
            self.cursor.mark()
            key = yield from self.cursor.matches(_IDENTIFIER, _MOST_OF_KEY)
            yield from self.cursor.space(MOST_SPACE)
            if key and (yield from self.cursor.accept("=")):
                self.cursor.forget()
                with suppress(ValueError):
                    keys.remove(key)
            else:  # a value without a key
                self.cursor.back()
                if not (yield from self.cursor.more()) or (
                    key
                    and self.cursor.ended
                    and self.cursor.here(key)
                    and self.cursor.available(len(key) + 1) == key
                ):
                    return True
                key = keys.pop(0) if keys else "argument"
            yield from self.cursor.space()
            fields.key(key)
            if not (yield from self._value(self.tools.argument(name, key))):
                return True
            yield from self.cursor.accept(",")

    def _value(self, schema: object) -> Wait[bool]:
        """Reads a value; returns False if the text ends within it."""
        pieces: list[str] = []
        depth = 0
        while (yield from self.cursor.more()):
            pieces.append((yield from self.cursor.matches(_OUTSIDE)))
            if not (yield from self.cursor.more()):
                break
            character = self.cursor.available(1)
            if character in "\"'":
                if not (yield from self._string(pieces, _BEHIND_PART if depth else _BEHIND_VALUE)):
                    break
            elif not depth and character in ",)]}":
                text = "".join(pieces).strip()
                self.writer.arguments(json.dumps(_value_of(text, schema), ensure_ascii=False))
                return bool(text) or character in ",)"  # which are read
            else:
                depth += 1 if character in "([{" else -1 if character in ")]}" else 0
                pieces.append(self.cursor.take(1))
        self._cut("".join(pieces))
        return False

    def _string(self, pieces: list[str], behind: str) -> Wait[bool]:
        quote = self.cursor.available(1)
        triple = yield from self.cursor.follows(quote * 3)
        end = quote * 3 if triple else quote
        pieces.append(self.cursor.take(len(end)))
        while (yield from self.cursor.more()):
            text = yield from self.cursor.matches(_IN_STRING[quote])
            pieces.append(text if triple else text.translate(_LINE_ENDS))
            if not (yield from self.cursor.more()):
                return False
            if (yield from self.cursor.accept(end)):
                if triple or (yield from self._is_before(behind)):
                    pieces.append(end)
                    return True
                pieces.append(f"\\{end}")
                continue
            pieces.append(self.cursor.take(1))
            if pieces[-1] == "\\" and (yield from self.cursor.more()):
                pieces.append(self.cursor.take(1))
        return False

    def _is_before(self, characters: str) -> Wait[bool]:
        """Returns True if the text ends here, or one of some characters follows."""
        self.cursor.mark()
        yield from self.cursor.space(MOST_SPACE)
        found = not (yield from self.cursor.more()) or self.cursor.available(1) in characters
        self.cursor.back()
        return found

    def _cut(self, text: str) -> None:
        """Writes what there is of a value that was cut off: the beginning of a string, or digits."""
        text = text.strip()
        if text[:1] in ("'", '"') and text:
            quote = text[:1]
            for end in (quote, quote[:0] + "x" + quote):
                with suppress(ValueError):
                    value = python_value(text + end)
                    if isinstance(value, str):
                        self.writer.arguments('"')
                        self.writer.quoted(value if end == quote else value[:-1])
                        return
            return
        if re.fullmatch(r"-?\d+(\.\d+)?", text):
            self.writer.arguments(text)


def _value_of(text: str, schema: object) -> object:
    """Returns what a literal says; names that are none stay text."""
    try:
        value = python_value(text)
    except ValueError:
        with suppress(ValueError, RecursionError):
            return json.loads(text)
        return typed(text, schema)
    if is_text(schema) and not isinstance(value, str):
        return text if value is not None else None
    if isinstance(value, str) and types(schema) and "string" not in types(schema):
        return typed(value, schema)
    return value
