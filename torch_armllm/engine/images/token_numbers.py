"""Numbers of each token of a step that plans of pictures read beside its id."""

from __future__ import annotations

from array import array
from typing import Any, Protocol

from torch_armllm.engine.images.image_rows import PictureRows
from torch_armllm.engine.scheduling.step import Step


class TokenNumbers(Protocol):
    """Numbers of each token, a further input of the plan.

    Attributes:
        columns: numbers of a token.
    """

    columns: int

    def write(self, items: Any, step: Step) -> None:
        """Writes those of all tokens of a step to the beginning of an array of int64."""
        ...

    def of(self, rows: PictureRows | None, start: int, end: int) -> array[int]:
        """Returns those of the tokens of a prompt or its answer, one token after another.

        Args:
            rows: of its items; None: it has none.
            start: position of the first token.
            end: behind the last one.
        """
        ...


class RotaryPositions:
    """Positions of M-RoPE, such as a time, a row and a column; they are equal for tokens of texts.

    Args:
        columns: positions of a token.
    """

    def __init__(self, columns: int = 3) -> None:
        self.columns = columns

    def write(self, items: Any, step: Step) -> None:
        """See `TokenNumbers.write`."""
        write_sequences(self, items, step)

    def of(self, rows: PictureRows | None, start: int, end: int) -> array[int]:
        """See `TokenNumbers.of`."""
        columns, after = self.columns, 0
        values = array("q")
        if rows is not None and rows.rotary is not None:
            values = rows.rotary[columns * start : columns * end]
            after = rows.rotary_offset
        for position in range(start + len(values) // columns + after, end + after):
            values.extend((position,) * columns)
        return values


class LaterTokens:
    """Number of later tokens that each token attends to: those of its item, or of its prompt.

    Args:
        only_windows: True if layers without a window do not.
    """

    columns = 1

    def __init__(self, only_windows: bool = False) -> None:
        self.only_windows = only_windows

    def write(self, items: Any, step: Step) -> None:
        """See `TokenNumbers.write`."""
        write_sequences(self, items, step)

    def of(self, rows: PictureRows | None, start: int, end: int) -> array[int]:
        """See `TokenNumbers.of`."""
        values = array("q", bytes(8 * (end - start)))
        for first, last in () if rows is None else rows.spans:
            for position in range(max(first, start), min(last, end)):
                values[position - start] = last - 1 - position
        return values


def write_sequences(numbers: TokenNumbers, items: Any, step: Step) -> None:
    """Writes the numbers of the tokens of each sequence of a step, one after another."""
    at, columns = 0, numbers.columns
    for sequence, start, count in step.scheduled:
        items[columns * at : columns * (at + count)] = numbers.of(
            sequence.request.pictures, start, start + count
        )
        at += count
