"""Reading of a JSON value, as text, while it arrives."""

from __future__ import annotations

import re
from collections.abc import Callable

from torch_armllm.chat_format.cursor import Cursor, Wait

_OUTSIDE, _INSIDE = re.compile(r'[^{}\[\]"]*'), re.compile(r'[^"\\]*')
_LITERAL = re.compile(r"[^\s,:{}\[\]\"]*")


def json_string(cursor: Cursor, emit: Callable[[str], None]) -> Wait[bool]:
    """Reads a string, its quotes included; returns False if the text ends within it."""
    emit(cursor.take(1))
    while (yield from cursor.more()):
        emit((yield from cursor.matches(_INSIDE)))
        if not (yield from cursor.more()):
            break
        character = cursor.take(1)
        if character == '"':
            emit(character)
            return True
        if not (yield from cursor.more()):
            break
        emit(character + cursor.take(1))
    return False


def json_value(cursor: Cursor, emit: Callable[[str], None]) -> Wait[bool]:
    """Reads a value; returns False if the text ends within it, or there is none."""
    if not (yield from cursor.more()):
        return False
    first = cursor.available(1)
    if first == '"':
        return (yield from json_string(cursor, emit))
    if first not in "{[":
        literal = yield from cursor.matches(_LITERAL)
        emit(literal)
        return bool(literal) and (yield from cursor.more())
    depth = 0
    while (yield from cursor.more()):
        emit((yield from cursor.matches(_OUTSIDE)))
        if not (yield from cursor.more()):
            break
        if cursor.here('"'):
            if not (yield from json_string(cursor, emit)):
                return False
            continue
        bracket = cursor.take(1)
        emit(bracket)
        depth += 1 if bracket in "{[" else -1
        if not depth:
            return True
    return False
