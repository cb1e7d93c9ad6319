"""Selection of tokens with the sizes of DeepSeek-V3.2's indexer: 64 heads of 128, 2048 tokens selected."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_armllm.ops.select import select_tokens

HEADS, SIZE, TOP_K, BLOCK = 64, 128, 2048, 16


@pytest.mark.parametrize("positions", [2048, 8192])
@pytest.mark.parametrize("tokens", [1, 64])
def test_select_tokens(measure: Any, tokens: int, positions: int) -> None:
    blocks = positions // BLOCK
    q, weights = torch.randn(tokens, HEADS, SIZE).bfloat16(), torch.rand(tokens, HEADS)
    keys = torch.randn(blocks, BLOCK, SIZE).bfloat16()
    table = torch.randperm(blocks, dtype=torch.int32)[None]
    starts, lengths = (torch.tensor(n, dtype=torch.int32) for n in ([0, tokens], [positions]))
    measure(
        lambda: select_tokens(q, weights, keys, table, starts, lengths, positions, SIZE**-0.5, TOP_K),
        operations=2 * tokens * positions * HEADS * SIZE if positions > TOP_K else 0,  # else all are selected
    )
