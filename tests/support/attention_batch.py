"""Sequences in a paged cache for the tests of attention."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torch_armllm.ops import attention


@dataclass(frozen=True)
class Batch:
    """Sequences in a cache, and the queries of their last tokens."""

    q: Tensor
    cache: attention.KvCache
    table: Tensor
    lengths: tuple[int, ...]
    new: tuple[int, ...]
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None

    def arguments(self) -> tuple[Any, ...]:
        start = torch.tensor([sum(self.new[:i]) for i in range(len(self.new) + 1)], dtype=torch.int32)
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        longest = max(self.lengths, default=0)
        scale = 1.0 / math.sqrt(self.q.shape[-1])
        head = (self.q, self.cache.k, self.cache.v, self.table, start, lengths, longest, scale)
        return (*head, self.window, self.softcap, self.sinks, self.cache.k_scales, self.cache.v_scales)

    def run(self) -> Tensor:
        return attention.paged_attention(*self.arguments())

    def reference(self) -> Tensor:
        return attention.reference_paged_attention(*self.arguments())

    def only(self, sequence: int, token: int | None = None) -> Batch:
        """One sequence alone, or one of its new tokens as a decode step that ends there."""
        first = sum(self.new[:sequence])
        table = self.table[sequence : sequence + 1]
        length, new = self.lengths[sequence], self.new[sequence]
        if token is None:
            q = self.q[first : first + new]
            return replace(self, q=q, table=table, lengths=(length,), new=(new,))
        q = self.q[first + token : first + token + 1]
        return replace(self, q=q, table=table, lengths=(length - new + token + 1,), new=(1,))


def make_batch(
    lengths: tuple[int, ...],
    new: tuple[int, ...],
    *,
    heads: tuple[int, int] = (2, 1),
    sizes: tuple[int, int] = (32, 32),
    block: int = 16,
    cache: torch.dtype = torch.float32,
    dtype: torch.dtype = torch.float32,
    window: int = 0,
    softcap: float = 0.0,
    sinks: bool = False,
    seed: int = 0,
) -> Batch:
    """Blocks in random order, NaN wherever nothing was written, queries a column slice of a wider tensor."""
    random = torch.Generator().manual_seed(seed)
    counts = [-(-n // block) for n in lengths]
    blocks = sum(counts) + 2
    made = attention.new_kv_cache(blocks, heads[1], *sizes, block, cache)
    for tensor in made:
        if tensor is not None:
            tensor.fill_(math.nan if tensor.is_floating_point() else 77)
    order = torch.randperm(blocks, generator=random).to(torch.int32)
    table = torch.full((len(lengths), max(counts, default=0)), -1, dtype=torch.int32)
    for i, count in enumerate(counts):
        table[i, :count] = order[sum(counts[:i]) : sum(counts[: i + 1])]
        position = torch.arange(lengths[i])
        slots = table[i].long()[position // block] * block + position % block
        k = torch.randn(lengths[i], heads[1], sizes[0], generator=random).to(dtype)
        v = torch.randn(lengths[i], heads[1], sizes[1], generator=random).to(dtype)
        attention.kv_write(k, v, made.k, made.v, slots, made.k_scales, made.v_scales)
    wide = torch.randn(sum(new), heads[0] * sizes[0] + 5, generator=random).to(dtype)
    q = wide[:, 2 : 2 + heads[0] * sizes[0]].unflatten(1, (heads[0], sizes[0]))
    logits = torch.randn(heads[0], generator=random) if sinks else None
    return Batch(q, made, table, lengths, new, window, softcap, logits)
