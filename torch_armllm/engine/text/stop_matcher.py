"""Search for a stop string in a text that grows."""

from __future__ import annotations


class StopMatcher:
    """Position of one stop string in a text (Knuth, Morris and Pratt).

    Each character is looked at once, whatever the text and the stop string repeat: a request may force tokens
    that are nearly its stop string, over and over.

    Args:
        stop: the stop string.
    """

    __slots__ = ("_borders", "_matched", "_stop")

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._matched = 0
        self._borders = [0, 0]  # by the length of a beginning of `stop`; as many as were asked for

    @property
    def matched(self) -> int:
        """Number of the text's last characters that may be the beginning of the stop string."""
        return self._matched

    def find(self, text: str, begin: int = 0) -> int | None:
        """Reads the next characters of the text, from ``begin`` on, until the stop string ends.

        Returns:
            The position behind the stop string; None if it has not ended.
        """
        stop, matched, at = self._stop, self._matched, begin
        while at < len(text):
            if not matched and (at := text.find(stop[0], at)) < 0:
                break
            character = text[at]
            while matched and stop[matched] != character:
                matched = self._border(matched)
            if stop[matched] == character:
                matched += 1
            at += 1
            if matched == len(stop):
                self._matched = self._border(matched)
                return at
        self._matched = matched
        return None

    def _border(self, length: int) -> int:
        """Returns how long an end of so many characters of the stop string is that also begins it."""
        stop, borders = self._stop, self._borders
        while len(borders) <= length:
            border, character = borders[-1], stop[len(borders) - 1]
            while border and stop[border] != character:
                border = borders[border]
            borders.append(border + (stop[border] == character))
        return borders[length]
