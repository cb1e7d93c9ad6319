"""Token ids of a batch that grows by a column a step, and the rules that end it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria

_RESERVED = 256
"""Columns that are allocated beyond the filled ones."""


class TokenRows:
    """Prompts and new tokens of a batch.

    Args:
        prompt: int64 ``(batch, length)``.
        stopping_criteria: transformers' list.  The two that nearly every call has are decided in Python; the
            others are called.
        pad: token that rows get after their end; None: they have no end of their own.
    """

    def __init__(self, prompt: Tensor, stopping_criteria: Any, pad: int | None) -> None:
        self.count, self.length = prompt.shape
        self._ends: set[int] = set()
        self._most: int | None = None
        self._others: list[Any] = []
        for criterion in stopping_criteria:
            if type(criterion) is EosTokenCriteria:
                self._ends.update(criterion.eos_token_id.flatten().tolist())
            elif type(criterion) is MaxLengthCriteria and not _reminds(criterion):
                most = criterion.max_length
                self._most = most if self._most is None else min(self._most, most)
            else:
                self._others.append(criterion)
        self.pads_ended = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        self.pad = 0 if pad is None else pad
        self.alive = [True] * self.count
        most_new = _RESERVED if self._most is None else self._most - self.length
        self._ids = _widened(prompt, self.length + max(0, min(most_new, _RESERVED)))

    @property
    def ids(self) -> Tensor:
        """All tokens so far, int64 ``(batch, length)``, contiguous."""
        return self._ids[:, : self.length].contiguous()

    def padded(self, token_ids: Sequence[int]) -> list[int]:
        """Returns the tokens of a step, with padding for the rows that have ended."""
        if not self.pads_ended or all(self.alive):
            return list(token_ids)
        return [t if alive else self.pad for t, alive in zip(token_ids, self.alive, strict=True)]

    def append(self, column: Tensor, token_ids: Sequence[int], scores: Any) -> bool:
        """Appends a token to each row; returns True if all rows have ended.

        Args:
            column: int64 ``(batch,)``.
            token_ids: the same in Python.
            scores: what stopping criteria receive.
        """
        if self.length == self._ids.shape[1]:
            self._ids = _widened(self._ids, 2 * self.length + _RESERVED)
        self._ids[:, self.length] = column
        self.length += 1
        if self._ends:
            for row, token in enumerate(token_ids):
                if token in self._ends:
                    self.alive[row] = False
        if self._others:
            ids = self.ids
            for criterion in self._others:
                done = torch.as_tensor(criterion(ids, scores)).expand(self.count).tolist()
                self.alive = [alive and not ended for alive, ended in zip(self.alive, done, strict=True)]
        full = self._most is not None and self.length >= self._most
        return full or not any(self.alive)


def _widened(ids: Tensor, columns: int) -> Tensor:
    wide = ids.new_empty(ids.shape[0], columns)
    wide[:, : ids.shape[1]] = ids
    return wide


def _reminds(criterion: MaxLengthCriteria) -> bool:
    """True if a criterion may warn that the text gets longer than the model's positions."""
    most = getattr(criterion, "max_position_embeddings", None)
    return most is not None and most < criterion.max_length
