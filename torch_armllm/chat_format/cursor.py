"""A place in a text that grows; parsers that are generators wait there for more."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

T = TypeVar("T")
Wait = Generator[None, None, T]
"""A parser that yields where it needs more text."""

MOST_SPACE = 1000
"""White space that a marker may have between its parts, so that what is held back stays short."""


class Markers:
    """Finds the first of several texts in a text."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = frozenset(filter(None, texts))
        longest = sorted(self.texts, key=lambda text: (-len(text), text))
        self._pattern = re.compile("|".join(map(re.escape, longest))) if longest else None
        self._beginnings = {text[:n] for text in longest for n in range(1, len(text))}
        self._most = max(map(len, longest), default=1) - 1

    def search(self, text: str, at: int) -> re.Match[str] | None:
        """Returns the first marker at or behind a position."""
        return None if self._pattern is None else self._pattern.search(text, at)

    def held(self, text: str, at: int) -> int:
        """Returns how many characters at the end of a text may be the beginning of a marker."""
        most = min(len(text) - at, self._most)
        return next((n for n in range(most, 0, -1) if text[len(text) - n :] in self._beginnings), 0)


class Cursor:
    """Reads a text that arrives in pieces; each character is looked at a bounded number of times.

    Attributes:
        ended: True once no more text comes.
        cut: True if it ended because of a limit.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._dropped = 0  # characters that are not kept any more
        self._marks: list[int] = []
        self._records: list[list[str]] = []
        self.ended = self.cut = False

    @property
    def place(self) -> int:
        """Number of characters before this place."""
        return self._dropped + self._at

    def add(self, text: str) -> None:
        """Adds the next characters."""
        keep = min([*self._marks, self._at])
        self._text = self._text[keep:] + text
        self._at -= keep
        self._dropped += keep
        self._marks = [mark - keep for mark in self._marks]

    def take(self, count: int) -> str:
        """Reads characters that are there."""
        piece = self._text[self._at : self._at + count]
        self._at += count
        for record in self._records:
            record.append(piece)
        return piece

    def mark(self) -> None:
        """Remembers this place; what follows should be short until `back` or `forget`."""
        self._marks.append(self._at)

    def back(self) -> None:
        """Returns to the last mark."""
        count = self._at - self._marks[-1]
        self._at = self._marks.pop()
        for record in self._records:
            _shorten(record, count)

    def forget(self) -> None:
        """Removes the last mark."""
        self._marks.pop()

    def record(self) -> None:
        """Keeps the characters that are read from here on, beside those that are kept already."""
        self._records.append([])

    def record_from_mark(self) -> None:
        """Keeps the characters that were read since the last mark, and those that are read from here on."""
        self._records.append([self._text[self._marks[-1] : self._at]])

    def recorded(self) -> str:
        """Returns the characters that were kept since the last `record`, and keeps no more."""
        return "".join(self._records.pop())

    def here(self, text: str) -> bool:
        """True if a text that has arrived follows."""
        return self._text.startswith(text, self._at)

    def available(self, most: int) -> str:
        """Returns characters that have arrived, without reading them."""
        return self._text[self._at : self._at + most]

    def more(self) -> Wait[bool]:
        """Waits for text if none is left; returns False at the end."""
        while self._at >= len(self._text) and not self.ended:
            yield
        return self._at < len(self._text)

    def follows(self, text: str) -> Wait[bool]:
        """Returns True if a text follows; reads nothing."""
        while True:
            there = self._text[self._at : self._at + len(text)]
            if there == text:
                return True
            if self.ended or not text.startswith(there):
                return False
            yield

    def accept(self, text: str) -> Wait[bool]:
        """Reads a text if it follows."""
        found = yield from self.follows(text)
        if found:
            self.take(len(text))
        return found

    def space(self, most: int | None = None) -> Wait[str]:
        """Reads white space."""
        pieces: list[str] = []
        size = 0
        while most is None or size < most:
            rest = self._text[self._at : None if most is None else self._at + most - size]
            blank = len(rest) - len(rest.lstrip())
            pieces.append(self.take(blank))
            size += blank
            if blank < len(rest) or not (yield from self.more()):
                break
        return "".join(pieces)

    def matches(self, pattern: re.Pattern[str], most: int | None = None) -> Wait[str]:
        """Reads what a pattern of any number of single characters matches, up to a number of them."""
        pieces: list[str] = []
        size = 0
        while (most is None or size < most) and (yield from self.more()):
            end = len(self._text) if most is None else self._at + most - size
            found = pattern.match(self._text, self._at, end)
            piece = self.take(0 if found is None else found.end() - self._at)
            pieces.append(piece)
            size += len(piece)
            if self._at < len(self._text):
                break
        return "".join(pieces)

    def until(
        self, markers: Markers, emit: Callable[[str], None], keeps_half: bool = True
    ) -> Wait[str | None]:
        """Reads up to the first marker, which is not read; emits what comes as soon as it is no marker.

        Args:
            markers: the markers.
            emit: takes the text.
            keeps_half: False: half a marker that a limit has cut off is no text.

        Returns:
            The marker; None at the end of the text.
        """
        while True:
            found = markers.search(self._text, self._at)
            held = 0 if self.ended else markers.held(self._text, self._at)
            if found is not None and found.start() <= len(self._text) - held:
                if found.start() > self._at:
                    emit(self.take(found.start() - self._at))
                if self.ended or found.start() != len(self._text) - held:
                    return found[0]
            elif self.ended:
                half = 0 if keeps_half or not self.cut else markers.held(self._text, self._at)
                if (count := len(self._text) - self._at - half) > 0:
                    emit(self.take(count))
                self.take(half)
                return None
            else:
                count = len(self._text) - self._at - held  # a longer marker may begin before a short one
                if count:
                    emit(self.take(count))
            yield


def _shorten(pieces: list[str], count: int) -> None:
    """Removes characters from the end of a list of pieces."""
    while count and pieces:
        last = pieces.pop()
        if len(last) > count:
            pieces.append(last[:-count])
        count -= min(count, len(last))
