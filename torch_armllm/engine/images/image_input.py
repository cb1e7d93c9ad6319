"""The input by which a plan computes tokens of pictures."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class PictureInput:
    """The rows of a step's tokens in the input that `with_given_rows` describes; those of texts are neutral.

    Args:
        columns: of a row.
        dtype: of the hidden states.

    Attributes:
        columns: of a row.
    """

    def __init__(self, columns: int, dtype: torch.dtype) -> None:
        self.columns = columns
        self._rows = torch.empty(0, columns, dtype=dtype)
        self._written: list[int] = []

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the rows."""
        return self._rows.dtype

    @property
    def capacity(self) -> int:
        """Tokens that there is room for."""
        return len(self._rows)

    @property
    def written(self) -> Sequence[int]:
        """Numbers of the tokens of pictures, in order."""
        return self._written

    def reserve(self, tokens: int) -> None:
        """Makes room for the tokens of a step; earlier views are no longer written to."""
        self._rows = self._rows.new_zeros(tokens, self._rows.shape[1])
        self._rows[:, -1] = 1.0
        self._written.clear()

    def view(self, tokens: int) -> Tensor:
        """Returns the rows of the first tokens, ``(tokens, columns)``."""
        return self._rows[:tokens]

    def of(self, tokens: Sequence[int]) -> Tensor:
        """Returns a copy of the rows ``(n, columns − 1)`` of n tokens of pictures, by their numbers."""
        return self._rows[tokens, :-1]

    def clear(self) -> None:
        """Makes all tokens those of texts."""
        if self._written:
            self._rows[self._written, :-1] = 0.0
            self._rows[self._written, -1] = 1.0
            self._written.clear()

    def write(self, tokens: Sequence[int], rows: Tensor) -> None:
        """Writes the rows ``(n, columns − 1)`` of n tokens of pictures, by their numbers in the step."""
        self._rows[tokens, :-1] = rows
        self._rows[tokens, -1] = 0.0
        self._written += tokens
