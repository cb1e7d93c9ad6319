"""The block table of a step, in a buffer that is reused."""

from __future__ import annotations

from array import array

from torch import Tensor

from torch_armllm.plan.shared_buffer import SharedBuffer


class BlockTable:
    """Block table of a step, one row per sequence; only blocks that changed are written."""

    def __init__(self) -> None:
        self.written: list[list[int]] = []
        self._reserve(8, 64)

    def _reserve(self, rows: int, width: int) -> None:
        self._width = width
        self._buffer = SharedBuffer("i", rows * width)
        self._views: dict[int, Tensor] = {}
        before, self.written = self.written, [[] for _ in range(rows)]
        for row, blocks in enumerate(before):
            self.write(row, blocks)

    def write(self, row: int, blocks: list[int]) -> None:
        """Writes these blocks to the start of a row; entries after them keep their old values."""
        if len(blocks) > self._width:
            self._reserve(len(self.written), 2 * len(blocks))
        previous = self.written[row]
        same = len(previous) if blocks[: len(previous)] == previous else 0
        first = row * self._width
        self._buffer.items[first + same : first + len(blocks)] = array("i", blocks[same:])
        self.written[row] = list(blocks)

    def reserve_rows(self, rows: int) -> None:
        """Grows the table to at least ``rows`` rows."""
        if rows > len(self.written):
            self._reserve(2 * rows, self._width)

    def view(self, rows: int) -> Tensor:
        """Returns the first rows, int32 ``(rows, width)``."""
        view = self._views.get(rows)
        if view is None:
            view = self._views[rows] = self._buffer.view(rows, self._width)
        return view
