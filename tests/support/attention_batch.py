"""Random sequences in a paged KV cache, for the tests of attention."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torch_armllm.ops import attention, variants

CACHES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8)
"""Dtypes of KV caches."""
RUNNABLE = variants.machine().distinct("attention")
"""A variant for each of the attention kernels that run on this machine."""


@dataclass(frozen=True)
class Batch:
    """Sequences in a paged KV cache, and the queries of their last tokens.

    Attributes:
        q: queries (tokens, query heads, head size) of all sequences, one sequence after the other.
        cache: the KV cache.
        block_table: int32 (sequences, blocks), padded with -1.
        seq_lens: tokens in the cache, per sequence; includes those with queries.
        query_lens: tokens with queries, per sequence.
        window: size of the sliding window; 0 for none.
        softcap: soft cap of the scores; 0 for none.
        sinks: logit of the attention sink, per query head, or per token and query head.
        slopes: ALiBi slope, per query head.
        relative: factors of the profiles (tokens, query heads, rank).
        profiles: bias by distance (rank, extent), from the largest distance to 0.
        ahead: later positions that a query sees.
        biases: bias by distance to both sides (query heads, 2 · reach + 1).
        later: later positions that each query sees (tokens,).
        group_size: query heads of a KV head, if groups are shared out; 0 if they are whole.
        skipped_heads: query heads that the first group lacks.
    """

    q: Tensor
    cache: attention.KvCache
    block_table: Tensor
    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None
    slopes: Tensor | None = None
    relative: Tensor | None = None
    profiles: Tensor | None = None
    ahead: int = 0
    biases: Tensor | None = None
    later: Tensor | None = None
    group_size: int = 0
    skipped_heads: int = 0

    def arguments(self) -> tuple[Any, ...]:
        """Returns the arguments of `paged_attention`."""
        lens = self.query_lens
        query_start = torch.tensor([sum(lens[:i]) for i in range(len(lens) + 1)], dtype=torch.int32)
        seq_lens = torch.tensor(self.seq_lens, dtype=torch.int32)
        scale = 1.0 / math.sqrt(self.q.shape[-1])
        return (
            *(self.q, self.cache.k, self.cache.v, self.block_table, query_start, seq_lens),
            *(max(self.seq_lens, default=0), scale, self.window, self.softcap, self.sinks),
            *(self.cache.k_scales, self.cache.v_scales, self.slopes, self.relative, self.profiles),
            *(self.ahead, self.biases, self.later, self.group_size, self.skipped_heads),
        )

    def run(self) -> Tensor:
        """Returns the output of the op, by the selected variant."""
        return attention.paged_attention(*self.arguments())

    def reference(self) -> Tensor:
        """Returns the output of the reference implementation."""
        return attention.reference_paged_attention(*self.arguments())

    def select(self, sequence: int, token: int | None = None) -> Batch:
        """Returns a batch of one sequence, or of one of its queries as a decode step that ends there."""
        first = sum(self.query_lens[:sequence])
        block_table = self.block_table[sequence : sequence + 1]
        seq_len, query_len = self.seq_lens[sequence], self.query_lens[sequence]
        if token is not None:
            first, seq_len, query_len = first + token, seq_len - query_len + token + 1, 1
        tokens = slice(first, first + query_len)
        of_tokens: dict[str, Any] = {"q": self.q[tokens]}
        if self.sinks is not None and self.sinks.dim() == 2:
            of_tokens["sinks"] = self.sinks[tokens]
        if self.relative is not None:
            of_tokens["relative"] = self.relative[tokens]
        if self.later is not None:
            of_tokens["later"] = self.later[tokens]
        return replace(
            self, **of_tokens, block_table=block_table, seq_lens=(seq_len,), query_lens=(query_len,)
        )

    def heads(self, begin: int, end: int) -> Batch:
        """Returns a batch of some query heads, and of the KV heads that they read."""
        group = self.q.shape[1] // self.cache.k.shape[1]
        own, read = slice(begin, end), slice(begin // group, -(-end // group))
        parts = [None if each is None else each[:, read].contiguous() for each in self.cache]
        return replace(
            self,
            q=self.q[:, own],
            cache=attention.KvCache(*parts),  # type: ignore[arg-type]
            sinks=None if self.sinks is None else self.sinks[..., own],
            slopes=None if self.slopes is None else self.slopes[own],
            relative=None if self.relative is None else self.relative[:, own],
            biases=None if self.biases is None else self.biases[own],
            group_size=group,
            skipped_heads=begin % group,
        )


def make_batch(
    seq_lens: tuple[int, ...],
    query_lens: tuple[int, ...],
    *,
    heads: tuple[int, int] = (2, 1),
    head_sizes: tuple[int, int] = (32, 32),
    block_size: int = 16,
    cache_dtype: torch.dtype = torch.float32,
    dtype: torch.dtype = torch.float32,
    window: int = 0,
    softcap: float = 0.0,
    sinks: bool | str = False,
    slopes: bool = False,
    extent: int = 0,
    ahead: int = 0,
    reach: int = 0,
    spans: tuple[tuple[int, int], ...] = (),
    seed: int = 0,
) -> Batch:
    """Makes a random batch.

    Blocks are in random order.  Unused cache positions hold NaN (77 in INT8 caches), and queries are strided,
    so that reads out of bounds change the result.

    Args:
        seq_lens: tokens in the cache, per sequence.
        query_lens: tokens with queries, per sequence; they are the last ones.
        heads: number of query heads and of KV heads.
        head_sizes: size of a key and of a value; INT4 caches round them up.
        block_size: positions per block.
        cache_dtype: dtype of the cache.
        dtype: dtype of queries, keys and values before they are stored.
        window: size of the sliding window; 0 for none.
        softcap: soft cap of the scores; 0 for none.
        sinks: with random attention sinks; "by token": each token has its own.
        slopes: with ALiBi's slopes.
        extent: distances with a learned bias; 0 for none.
        ahead: later positions that a query sees.
        reach: distances with a learned bias of their own, to both sides; 0 for none.
        spans: first and last query, exclusive, of those that all see each other.
        seed: seed of all random values.
    """
    generator = torch.Generator().manual_seed(seed)
    query_heads, kv_heads = heads
    group = 32 if cache_dtype == torch.uint8 else 1
    key_size, value_size = (-(-size // group) * group for size in head_sizes)
    block_counts = [-(-n // block_size) for n in seq_lens]
    num_blocks = sum(block_counts) + 2
    cache = attention.new_kv_cache(num_blocks, kv_heads, key_size, value_size, block_size, cache_dtype)
    for tensor in cache:
        if tensor is not None:
            tensor.fill_(math.nan if tensor.is_floating_point() else 77)
    order = torch.randperm(num_blocks, generator=generator).to(torch.int32)
    block_table = torch.full((len(seq_lens), max(block_counts, default=0)), -1, dtype=torch.int32)
    for i, (seq_len, count) in enumerate(zip(seq_lens, block_counts, strict=True)):
        block_table[i, :count] = order[sum(block_counts[:i]) : sum(block_counts[: i + 1])]
        position = torch.arange(seq_len)
        slots = block_table[i].long()[position // block_size] * block_size + position % block_size
        k = torch.randn(seq_len, kv_heads, key_size, generator=generator).to(dtype)
        v = torch.randn(seq_len, kv_heads, value_size, generator=generator).to(dtype)
        attention.kv_write(k, v, cache.k, cache.v, slots, cache.k_scales, cache.v_scales)
    wide = torch.randn(sum(query_lens), query_heads * key_size + 5, generator=generator).to(dtype)
    q = wide[:, 2 : 2 + query_heads * key_size].unflatten(1, (query_heads, key_size))
    by_token = (sum(query_lens),) if sinks == "by token" else ()
    sink_logits = torch.randn(*by_token, query_heads, generator=generator) if sinks else None
    alibi = 2.0 ** -torch.linspace(0.5, 8, query_heads) if slopes else None
    batch = Batch(
        q, cache, block_table, seq_lens, query_lens, window, softcap, sink_logits, alibi, ahead=ahead
    )
    if reach:
        batch = replace(batch, biases=torch.randn(query_heads, 2 * reach + 1, generator=generator))
    if spans:
        later = torch.zeros(sum(query_lens), dtype=torch.int64)
        for first, last in spans:
            later[first:last] = torch.arange(last - first).flip(0)
        batch = replace(batch, later=later)
    if extent == 0:
        return batch
    relative = torch.randn(sum(query_lens), query_heads * 5 + 2, generator=generator)[:, :-2]
    profiles = torch.randn(5, extent, generator=generator)
    return replace(batch, relative=relative.unflatten(1, (query_heads, 5)), profiles=profiles)
