"""Calls of attention over texts of chosen lengths, whose blocks lie in random order.

Positions of the cache that no text has hold NaN, or other bytes where it holds integers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.ops.properties import OpCall
from torch_armllm.ops import attention, mla

Lengths = tuple[int, ...]
SIZES = (32, 8)
"""Rank of a latent, and size of the rotary part."""


@dataclass(frozen=True)
class Places:
    """Places of random sequences in a paged cache; their blocks are in random order.

    Attributes:
        blocks: number of blocks of the cache; two are not used.
        block_table: int32 (sequences, blocks), padded with -1.
        slots: the slots of the tokens of each sequence: int64.
    """

    blocks: int
    block_table: Tensor
    slots: list[Tensor]

    @classmethod
    def random(cls, seq_lens: tuple[int, ...], block_size: int, random: torch.Generator) -> Places:
        """Places sequences of these lengths."""
        counts = [-(-n // block_size) for n in seq_lens]
        blocks = sum(counts) + 2
        order = torch.randperm(blocks, generator=random).to(torch.int32)
        table = torch.full((len(seq_lens), max(counts, default=0)), -1, dtype=torch.int32)
        slots = []
        for i, (length, count) in enumerate(zip(seq_lens, counts, strict=True)):
            table[i, :count] = order[sum(counts[:i]) : sum(counts[: i + 1])]
            at = torch.arange(length)
            slots.append(table[i].long()[at // block_size] * block_size + at % block_size)
        return cls(blocks, table, slots)

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        """The length and the slots of each sequence."""
        return ((len(slots), slots) for slots in self.slots)


def _steps(lengths: Lengths, new: Lengths, table: Tensor) -> dict[str, Any]:
    return {
        "block_table": table,
        "query_start": torch.tensor([0, *new]).cumsum(0).int(),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "max_seq_len": max(lengths, default=0),
    }


def paged_call(
    lengths: Lengths,
    new: Lengths,
    heads: tuple[int, int] = (2, 1),
    size: int = 32,
    cache_dtype: torch.dtype = torch.float32,
    **more: Any,
) -> OpCall:
    """Returns a call of `paged_attention`.

    Args:
        lengths: of the texts.
        new: tokens of each that attend, the last ones.
        heads: number of query heads and of KV heads.
        size: of a head.
        cache_dtype: dtype of the cache.
        more: other arguments of the op.
    """
    random = torch.Generator().manual_seed(0)
    places = Places.random(lengths, 16, random)
    cache = attention.new_kv_cache(places.blocks, heads[1], size, size, 16, cache_dtype)
    for tensor in cache:
        if tensor is not None:
            tensor.fill_(math.nan if tensor.is_floating_point() else 77)
    for length, slots in places:
        k, v = torch.randn(2, length, heads[1], size, generator=random)
        attention.kv_write(k, v, cache.k, cache.v, slots, cache.k_scales, cache.v_scales)
    own = {"k_cache": cache.k, "v_cache": cache.v, "k_scales": cache.k_scales, "v_scales": cache.v_scales}
    q = torch.randn(sum(new), heads[0], size, generator=random)
    steps = _steps(lengths, new, places.block_table)
    return OpCall("paged_attention", {"q": q, **own, **steps, "scale": size**-0.5, **more})


def latent_call(
    lengths: Lengths, new: Lengths, heads: int = 3, cache_dtype: torch.dtype = torch.float32, **more: Any
) -> OpCall:
    """Returns a call of `mla_attention`; see `paged_call`."""
    random = torch.Generator().manual_seed(0)
    places = Places.random(lengths, 16, random)
    cache = mla.new_latent_cache(places.blocks, *SIZES, 16, cache_dtype)
    cache.fill_(-1 if cache_dtype == torch.int8 else math.nan)  # scales of bytes -1 are NaN
    for length, slots in places:
        mla.mla_write(*torch.randn(length, sum(SIZES), generator=random).split(SIZES, -1), cache, slots)
    queries = torch.randn(sum(new), heads, sum(SIZES), generator=random).split(SIZES, -1)
    own = {"q_latent": queries[0], "q_rope": queries[1], "cache": cache, "scale": sum(SIZES) ** -0.5}
    return OpCall("mla_attention", {**own, **_steps(lengths, new, places.block_table), **more})
