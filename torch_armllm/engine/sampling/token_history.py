"""Tokens of a sequence as growing tensors, for the penalties."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor


class TokenHistory:
    """Tokens that penalties depend on; a step copies its new tokens only."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self._prompt = prompt_token_ids
        self._begin = len(prompt_token_ids)
        self._output = torch.empty(64, dtype=torch.int64)
        self._count = 0

    @functools.cached_property
    def prompt(self) -> Tensor:
        """Unique prompt tokens, int64: penalties depend on presence, not on count."""
        return torch.tensor(sorted(set(self._prompt)), dtype=torch.int64)

    def output(self, token_ids: Sequence[int], prefix: Sequence[int] = ()) -> Tensor:
        """Returns the output tokens of the sequence and ``prefix``, int64.

        Args:
            token_ids: of prompt and output; earlier tokens must not change between calls.
            prefix: draft tokens, treated as sampled.
        """
        length = len(token_ids) - self._begin
        needed = length + len(prefix)
        if needed > self._output.numel():
            grown = torch.empty(2 * needed, dtype=torch.int64)
            grown[: self._count] = self._output[: self._count]
            self._output = grown
        if length > self._count:
            new = token_ids[self._begin + self._count :]
            self._output[self._count : length] = torch.tensor(new, dtype=torch.int64)
            self._count = length
        if not prefix:
            return self._output[:length]
        return torch.cat([self._output[:length], torch.tensor(prefix, dtype=torch.int64)])
