"""Tokens of a sequence as tensors that grow with it, for the penalties."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor


class TokenHistory:
    """The tokens that penalties look at; only those that are new since the last step are copied."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self._prompt = prompt_token_ids
        self._begin = len(prompt_token_ids)
        self._output = torch.empty(64, dtype=torch.int64)
        self._count = 0

    @functools.cached_property
    def prompt(self) -> Tensor:
        """Each token of the prompt once, int64: for penalties it counts only whether it is there."""
        return torch.tensor(sorted(set(self._prompt)), dtype=torch.int64)

    def output(self, token_ids: Sequence[int], prefix: Sequence[int] = ()) -> Tensor:
        """The sequence's tokens, int64.

        Args:
            token_ids: of prompt and sequence; those that were there before are the same.
            prefix: drafted tokens that are taken for drawn.
        """
        known = len(token_ids) - self._begin
        needed = known + len(prefix)
        if needed > self._output.numel():
            grown = torch.empty(2 * needed, dtype=torch.int64)
            grown[: self._count] = self._output[: self._count]
            self._output = grown
        if known > self._count:
            new = token_ids[self._begin + self._count :]
            self._output[self._count : known] = torch.tensor(new, dtype=torch.int64)
            self._count = known
        if not prefix:
            return self._output[:known]
        return torch.cat([self._output[:known], torch.tensor(prefix, dtype=torch.int64)])
