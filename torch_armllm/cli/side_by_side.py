"""Two texts in columns, the right one while it is written."""

from __future__ import annotations

import textwrap


class SideBySide:
    """Prints a finished text on the left and a streamed text on the right."""

    def __init__(self, left: str, width: int) -> None:
        self.width = width
        self.left = _wrap(left, width)
        self.right = ""
        self.printed = 0

    def put(self, text: str) -> None:
        """Adds a piece to the right text and prints its complete lines."""
        self.right += text
        self._print(_wrap(self.right, self.width)[:-1])

    def end(self) -> None:
        """Prints the rest of both texts."""
        lines = _wrap(self.right, self.width)
        self._print(lines + [""] * (len(self.left) - len(lines)))

    def _print(self, lines: list[str]) -> None:
        for index in range(self.printed, len(lines)):
            left = self.left[index] if index < len(self.left) else ""
            print(f"  {left:<{self.width}} │ {lines[index]}", flush=True)
            self.printed += 1


def _wrap(text: str, width: int) -> list[str]:
    lines: list[str] = []
    for paragraph in text.split("\n"):
        lines += textwrap.wrap(paragraph, width) or [""]
    return lines
