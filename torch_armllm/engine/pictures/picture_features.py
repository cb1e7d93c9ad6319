"""Features of pictures that steps add to the hidden states of early layers."""

from __future__ import annotations

import torch
from torch import Tensor


class PictureFeatures:
    """A further input of a plan: the features of each token of a step, which are zeros for texts.

    Args:
        columns: of a token, those of all layers.
        dtype: of the hidden states.
    """

    def __init__(self, columns: int, dtype: torch.dtype) -> None:
        self._buffer = torch.zeros(0, columns, dtype=dtype)
        self._written: list[int] = []

    def reserve(self, tokens: int) -> None:
        """Makes room for the tokens of a step; views of fewer tokens are no longer written to."""
        self._buffer = self._buffer.new_zeros(tokens, self._buffer.shape[1])
        self._written.clear()

    def view(self, tokens: int) -> Tensor:
        """Returns those of the first tokens, ``(tokens, columns)``."""
        return self._buffer[:tokens]

    def clear(self) -> None:
        """Makes all of them zeros again."""
        self._buffer[self._written] = 0
        self._written.clear()

    def write(self, tokens: list[int], features: Tensor) -> None:
        """Writes features ``(n, columns)`` of n tokens, by their numbers in the step."""
        self._buffer[tokens] = features
        self._written += tokens
