"""Steps of whole texts, on a cache that each of them writes anew."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torch_armllm.kv_cache.shapes import Cache, Shape
from torch_armllm.plan.step import StepInputs

_MOST_TOKENS = 8192
"""Most tokens of a step, of whole texts: activations of more would need more memory and fit no cache."""


class TextSteps:
    """Inputs of steps that compute whole texts.

    Args:
        shape: of the cache that a step writes and reads.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._blocks = 0
        self._cache: Cache | None = None

    def step(self, counts: Tensor, ids: Tensor, positions: Tensor, given: Tensor | None = None) -> StepInputs:
        """Returns the inputs of a step.

        Args:
            counts: int64 ``(texts,)``, tokens of each text, T in all.
            ids: int64 ``(1, T)``.
            positions: int64 ``(1, T)``.
            given: see `StepInputs.given`.
        """
        size = self.shape.block_size
        blocks = (counts + size - 1) // size
        firsts = blocks.cumsum(0) - blocks
        starts = torch.zeros(len(counts) + 1, dtype=torch.int32)
        starts[1:] = counts.cumsum(0)
        places = torch.arange(ids.shape[1]) + (firsts * size - starts[:-1]).repeat_interleave(counts)
        table = firsts[:, None] + torch.arange(int(blocks.max()))
        return StepInputs(
            input_ids=ids,
            position_ids=positions,
            slots=places,
            block_table=table.clamp_(max=int(blocks.sum()) - 1).int(),
            query_start=starts,
            seq_lens=counts.int(),
            max_seq_len=int(counts.max()),
            cache=self._cache_of(int(blocks.sum())),
            given=given,
        )

    def _cache_of(self, blocks: int) -> Cache:
        """Returns a cache of at least so many blocks; a step writes all that it reads."""
        if self._cache is None or self._blocks < blocks:
            self._cache, self._blocks = None, 0  # frees it first
            self._cache, self._blocks = self.shape.tensors(blocks), blocks
        return self._cache


def whole_texts(counts: list[int]) -> Iterator[tuple[int, int]]:
    """Yields ranges of texts of at most `_MOST_TOKENS` tokens; a longer text is alone in its range."""
    begin = tokens = 0
    for number, count in enumerate(counts):
        if tokens and tokens + count > _MOST_TOKENS:
            yield begin, number
            begin, tokens = number, 0
        tokens += count
    if tokens:
        yield begin, len(counts)
