"""Attention to a part of a sequence, and the choice of the part.

Sizes are those of DeepSeek-V3.2's indexer (64 heads of 128, 2048 tokens), of MiniMax-M3 (64 query heads and 4
KV heads, 16 blocks of 128) and of DeepSeek-V4 (64 heads of 512, an entry for 4 or 128 tokens).
"""

from __future__ import annotations

import torch

from bench.micro.call import Call, over, sequence
from torch_armllm.ops import attention, select
from torch_armllm.ops import compress as entries

HEADS, KV_HEADS, SIZE = 64, 4, 128
SPAN, BLOCKS_CHOSEN, BLOCK = 128, 16, 32
ENTRY_SIZE, PAIRS, WINDOW, ENTRY_BLOCK = 512, 32, 128, 64
POSITIONS, ENTRIES_CHOSEN, TOKENS_CHOSEN = 8192, 512, 2048


@over(tokens=(1, 64), positions=(2048, 8192))
def select_tokens(tokens: int, positions: int) -> Call:
    q, weights = torch.randn(tokens, HEADS, SIZE).bfloat16(), torch.rand(tokens, HEADS)
    keys, step = torch.randn(positions // 16, 16, SIZE).bfloat16(), sequence(tokens, positions, 16)
    operations = 2 * tokens * positions * HEADS * SIZE
    return Call(
        lambda: select.select_tokens(q, weights, keys, *step, positions, SIZE**-0.5, TOKENS_CHOSEN),
        operations=operations if positions > TOKENS_CHOSEN else 0,  # else all are selected
    )


@over(tokens=(1, 64), positions=(8192, 65536))
def select_blocks(tokens: int, positions: int) -> Call:
    q, keys = torch.randn(tokens, KV_HEADS, SIZE), torch.randn(positions // BLOCK, BLOCK, SIZE).bfloat16()
    step = (*sequence(tokens, positions, BLOCK), positions, SPAN, BLOCKS_CHOSEN, 1)
    operations = 2 * tokens * positions * KV_HEADS * SIZE
    return Call(lambda: select.select_blocks(q, keys, *step), operations=operations)


@over(tokens=(1, 64))
def block_attention(tokens: int) -> Call:
    cache = attention.new_kv_cache(POSITIONS // BLOCK, KV_HEADS, SIZE, SIZE, BLOCK, torch.bfloat16)
    q, step = torch.randn(tokens, HEADS, SIZE).bfloat16(), (*sequence(tokens, POSITIONS, BLOCK), POSITIONS)
    keys = torch.randn(POSITIONS // BLOCK, BLOCK, SIZE).bfloat16()
    scored = torch.randn(tokens, KV_HEADS, SIZE)
    chosen = select.select_blocks(scored, keys, *step, SPAN, BLOCKS_CHOSEN, 1)
    return Call(
        lambda: attention.block_attention(q, cache.k, cache.v, chosen, SPAN, *step, SIZE**-0.5),
        operations=4 * tokens * HEADS * BLOCKS_CHOSEN * SPAN * SIZE,
    )


def _entries(rate: int) -> torch.Tensor:
    per_block = entries.most_per_block(ENTRY_BLOCK, rate)
    return torch.randn(POSITIONS // ENTRY_BLOCK, per_block, ENTRY_SIZE).bfloat16()


@over(tokens=(1, 128), rate=(4, 128))
def compress_windows(tokens: int, rate: int) -> Call:
    parts = 2 if rate == 4 else 1
    width = parts * ENTRY_SIZE
    kv, gate = torch.randn(2, tokens, width).bfloat16()
    cos, sin = torch.randn(2, tokens, PAIRS)
    state, found = torch.randn(1, rate * parts - 1, 2 * width).bfloat16(), _entries(rate)
    table, starts, lengths = sequence(tokens, POSITIONS, ENTRY_BLOCK)
    bias, weight, slots = torch.zeros(rate, width), torch.ones(ENTRY_SIZE), torch.zeros(1).long()
    return Call(
        lambda: entries.compress_windows(
            *(kv, gate, bias, weight, cos, sin, state, found),
            *(table, slots, starts, lengths, ENTRY_BLOCK, 1e-6),
        ),
        read=kv.nbytes + gate.nbytes,
    )


@over(tokens=(1, 64))
def select_entries(tokens: int) -> Call:
    q, weights = torch.randn(tokens, HEADS, SIZE).bfloat16(), torch.rand(tokens, HEADS)
    keys = torch.randn(POSITIONS // ENTRY_BLOCK, ENTRY_BLOCK // 4, SIZE).bfloat16()
    step = (*sequence(tokens, POSITIONS, ENTRY_BLOCK), POSITIONS, ENTRY_BLOCK, 4)
    return Call(
        lambda: entries.select_entries(q, weights, keys, *step, SIZE**-0.5, ENTRIES_CHOSEN),
        operations=2 * tokens * POSITIONS // 4 * HEADS * SIZE,
    )


@over(tokens=(1, 64), rate=(4, 128))
def entry_attention(tokens: int, rate: int) -> Call:
    """Attention to entries, of which some are selected where they stand for four tokens each."""
    q, found = torch.randn(tokens, HEADS, ENTRY_SIZE).bfloat16(), _entries(rate)
    cache = torch.randn(POSITIONS // ENTRY_BLOCK, ENTRY_BLOCK, ENTRY_SIZE).bfloat16()
    seen = (POSITIONS - tokens) // rate
    count = min(ENTRIES_CHOSEN, seen)
    chosen = torch.stack([torch.randperm(seen)[:count].sort().values for _ in range(tokens)]).int()
    step, scale = (*sequence(tokens, POSITIONS, ENTRY_BLOCK), POSITIONS), ENTRY_SIZE**-0.5
    return Call(
        lambda: entries.entry_attention(
            *(q, cache, found, *step, scale, WINDOW, rate, None), chosen if rate == 4 else None
        ),
        operations=4 * tokens * (WINDOW + count) * HEADS * ENTRY_SIZE,
    )
