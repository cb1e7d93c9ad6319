"""Compressed entries with the sizes of DeepSeek-V4: 64 heads of 512, an entry for 4 or 128 tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_armllm.ops.compress import compress_windows, entry_attention, most_per_block, select_entries

HEADS, SIZE, PAIRS, WINDOW, BLOCK = 64, 512, 32, 128, 64
INDEX_SIZE, TOP_K = 128, 512
POSITIONS = 8192
BLOCKS = POSITIONS // BLOCK


def step(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    table = torch.randperm(BLOCKS, dtype=torch.int32)[None]
    starts, lengths = (torch.tensor(n, dtype=torch.int32) for n in ([0, tokens], [POSITIONS]))
    return table, starts, lengths


@pytest.mark.parametrize(("rate", "parts"), [(4, 2), (128, 1)])
@pytest.mark.parametrize("tokens", [1, 128])
def test_compress_windows(measure: Any, tokens: int, rate: int, parts: int) -> None:
    width = parts * SIZE
    kv, gate = torch.randn(2, tokens, width).bfloat16()
    cos, sin = torch.randn(2, tokens, PAIRS)
    state = torch.randn(1, rate * parts - 1, 2 * width).bfloat16()
    entries = torch.zeros(BLOCKS, most_per_block(BLOCK, rate), SIZE, dtype=torch.bfloat16)
    table, starts, lengths = step(tokens)
    slots = torch.zeros(1, dtype=torch.int64)
    measure(
        lambda: compress_windows(
            *(kv, gate, torch.zeros(rate, width), torch.ones(SIZE), cos, sin, state, entries),
            *(table, slots, starts, lengths, BLOCK, 1e-6),
        ),
        read=kv.nbytes + gate.nbytes,
    )


@pytest.mark.parametrize("tokens", [1, 64])
def test_select_entries(measure: Any, tokens: int) -> None:
    q, weights = torch.randn(tokens, HEADS, INDEX_SIZE).bfloat16(), torch.rand(tokens, HEADS)
    keys = torch.randn(BLOCKS, BLOCK // 4, INDEX_SIZE).bfloat16()
    measure(
        lambda: select_entries(
            *(q, weights, keys, *step(tokens), POSITIONS, BLOCK, 4, INDEX_SIZE**-0.5, TOP_K)
        ),
        operations=2 * tokens * POSITIONS // 4 * HEADS * INDEX_SIZE,
    )


@pytest.mark.parametrize(("rate", "top_k"), [(4, TOP_K), (128, 0)])
@pytest.mark.parametrize("tokens", [1, 64])
def test_entry_attention(measure: Any, tokens: int, rate: int, top_k: int) -> None:
    q = torch.randn(tokens, HEADS, SIZE).bfloat16()
    cache = torch.randn(BLOCKS, BLOCK, SIZE).bfloat16()
    entries = torch.randn(BLOCKS, most_per_block(BLOCK, rate), SIZE).bfloat16()
    seen = (POSITIONS - tokens) // rate
    chosen = torch.stack([torch.randperm(seen)[:top_k].sort().values for _ in range(tokens)]).int()
    measure(
        lambda: entry_attention(
            *(q, cache, entries, *step(tokens), POSITIONS, SIZE**-0.5, WINDOW, rate, None),
            chosen if top_k else None,
        ),
        operations=4 * tokens * (WINDOW + (top_k or seen)) * HEADS * SIZE,
    )
