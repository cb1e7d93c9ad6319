"""Reading of a JSON value while it arrives; what models write instead of JSON becomes JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from torch_armllm.chat_format.cursor import Cursor, Wait

_INSIDE = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\\"]*")}
_LITERAL = re.compile(r"[^\s,:{}\[\]\"]*")
_BARE = re.compile(r"[^,:{}\[\]\"']*")
_COMMENT = re.compile(r"[^\n]*")
_JSON_LITERAL = re.compile(r"(?:-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null)?")
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_CONTROLS = {code: json.dumps(chr(code))[1:-1] for code in range(32)}
"""Escapes of characters that a JSON string may not hold as they are."""
_ESCAPED = '"\\/bfnrtu'


def json_string(cursor: Cursor, emit: Callable[[str], None]) -> Wait[bool]:
    """Reads a string, its quotes included; returns False if the text ends within it.

    Line ends, quotes of Python and escapes that JSON lacks become those of JSON.
    """
    quote = cursor.take(1)
    emit('"')
    while (yield from cursor.more()):
        emit((yield from cursor.matches(_INSIDE[quote])).translate(_CONTROLS))
        if not (yield from cursor.more()):
            break
        character = cursor.take(1)
        if character == quote:
            emit('"')
            return True
        if character == '"':
            emit('\\"')
            continue
        if not (yield from cursor.more()):
            break
        escaped = cursor.take(1)
        if escaped in _ESCAPED:
            emit(character + escaped)
        else:
            emit("'" if escaped == "'" else "\\\\" + escaped.translate(_CONTROLS))
    return False


def json_value(cursor: Cursor, emit: Callable[[str], None]) -> Wait[bool]:
    """Reads a value; returns False if the text ends within it, or there is none.

    Comments and commas before a closing bracket are left out, Python's names and strings become JSON's, and
    words without quotes strings.
    """
    if not (yield from cursor.more()):
        return False
    first = cursor.available(1)
    if first in "\"'":
        return (yield from json_string(cursor, emit))
    if first not in "{[":
        literal = yield from cursor.matches(_LITERAL)
        emit(literal)
        return bool(literal) and (yield from cursor.more())
    depth = 0
    comma = ""  # with the white space behind it
    while (yield from cursor.more()):
        space = yield from cursor.space()
        if comma:
            comma += space
        else:
            emit(space)
        if not (yield from cursor.more()):
            break
        if (yield from cursor.follows("//")):
            yield from cursor.matches(_COMMENT)
            continue
        character = cursor.available(1)
        if character in "]}":
            comma = comma[1:]
        emit(comma)
        comma = ""
        if character in "\"'":
            if not (yield from json_string(cursor, emit)):
                return False
        elif character in "{[]}:":
            emit(cursor.take(1))
            depth += 1 if character in "{[" else -1 if character in "]}" else 0
            if not depth:
                return True
        elif character == ",":
            comma = cursor.take(1)
        else:
            yield from _literal(cursor, emit)
    emit(comma)
    return False


def _literal(cursor: Cursor, emit: Callable[[str], None]) -> Wait[None]:
    """Reads a number, a name or words up to what ends them."""
    text = yield from cursor.matches(_BARE)
    word = text.rstrip()
    if (yield from cursor.more()) and not _JSON_LITERAL.fullmatch(word):
        emit(_PYTHON.get(word) or json.dumps(word, ensure_ascii=False))
    else:
        emit(word)
    emit(text[len(word) :])
