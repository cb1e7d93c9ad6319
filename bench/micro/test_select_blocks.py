"""Selection of blocks and attention to them with the sizes of MiniMax-M3: 64 query heads and 4 KV heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_armllm.ops.attention import block_attention, new_kv_cache
from torch_armllm.ops.select import select_blocks

HEADS, KV_HEADS, SIZE, SPAN, TOP_K, BLOCK = 64, 4, 128, 128, 16, 32


def steps(tokens: int, positions: int) -> tuple[Any, ...]:
    table = torch.randperm(positions // BLOCK, dtype=torch.int32)[None]
    starts, lengths = (torch.tensor(n, dtype=torch.int32) for n in ([0, tokens], [positions]))
    return table, starts, lengths, positions


@pytest.mark.parametrize("positions", [8192, 65536])
@pytest.mark.parametrize("tokens", [1, 64])
def test_select_blocks(measure: Any, tokens: int, positions: int) -> None:
    q, keys = torch.randn(tokens, KV_HEADS, SIZE), torch.randn(positions // BLOCK, BLOCK, SIZE).bfloat16()
    step = steps(tokens, positions)
    measure(
        lambda: select_blocks(q, keys, *step, SPAN, TOP_K, 1),
        operations=2 * tokens * positions * KV_HEADS * SIZE,
    )


@pytest.mark.parametrize("positions", [8192])
@pytest.mark.parametrize("tokens", [1, 64])
def test_block_attention(measure: Any, tokens: int, positions: int) -> None:
    cache = new_kv_cache(positions // BLOCK, KV_HEADS, SIZE, SIZE, BLOCK, torch.bfloat16)
    q, step = torch.randn(tokens, HEADS, SIZE).bfloat16(), steps(tokens, positions)
    keys = torch.randn(positions // BLOCK, BLOCK, SIZE).bfloat16()
    chosen = select_blocks(torch.randn(tokens, KV_HEADS, SIZE), keys, *step, SPAN, TOP_K, 1)
    measure(
        lambda: block_attention(q, cache.k, cache.v, chosen, SPAN, *step, SIZE**-0.5),
        operations=4 * tokens * HEADS * TOP_K * SPAN * SIZE,
    )
