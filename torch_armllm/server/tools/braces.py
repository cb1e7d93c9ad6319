"""Ends of the objects in a stream of JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator

_OUTSIDE, _INSIDE = re.compile(r'[{}"]'), re.compile(r'["\\]')


class Braces:
    """Finds where the outermost objects of a JSON text end; each character is looked at once."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False  # the next character follows a backslash

    def ends(self, text: str) -> Iterator[int]:
        """Yields the positions in the next characters behind which an object has ended."""
        at = 0
        if self._escaped and text:
            self._escaped, at = False, 1
        while (found := (_INSIDE if self._in_string else _OUTSIDE).search(text, at)) is not None:
            at = found.end()
            if (character := found[0]) == '"':
                self._in_string = not self._in_string
            elif character == "\\":
                self._escaped = at == len(text)
                at += 1
            elif character == "{":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth == 0:
                    yield at
