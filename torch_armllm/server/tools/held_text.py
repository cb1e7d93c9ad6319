"""Text that a parser holds back until it knows what it is."""

from __future__ import annotations


class HeldText:
    """Pieces of a text; each is looked at once, however long the text grows.

    To join all pieces, or to search them from the beginning, whenever one comes takes a time that is
    quadratic in their number.
    """

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def add(self, text: str) -> None:
        """Adds a piece."""
        if text:
            self._pieces.append(text)

    def take(self) -> str:
        """Returns the whole text, and holds nothing."""
        text = "".join(self._pieces)
        self._pieces.clear()
        return text
