"""mla_attention, mla_write and absorbed projections: DeepSeek-V2-Lite (16 heads) and V3 (128 heads)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_armllm.ops import linear, mla

RANK, ROPE, BLOCK = 512, 64, 64
HEAD = 128
"""Values of a head before the absorbed projection of queries and after that of results."""


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float16, torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize(("new", "length"), [(1, 4096), (128, 4096)], ids=["decode", "chunk"])
@pytest.mark.parametrize("heads", [16, 128])
def test_mla_attention(measure: Any, heads: int, new: int, length: int, cache: torch.dtype) -> None:
    blocks = length // BLOCK
    latents = mla.new_latent_cache(blocks, RANK, ROPE, BLOCK, cache)
    mla.mla_write(*torch.randn(length, RANK + ROPE).split([RANK, ROPE], -1), latents, torch.arange(length))
    table = torch.randperm(blocks).to(torch.int32)[None]
    q_latent, q_rope = torch.randn(new, heads, RANK + ROPE, dtype=torch.bfloat16).split([RANK, ROPE], -1)
    start, lengths = torch.tensor([0, new], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
    seen = new * length - new * (new - 1) // 2
    measure(
        lambda: mla.mla_attention(q_latent, q_rope, latents, table, start, lengths, length, 192**-0.5),
        read=latents.nbytes,
        operations=2 * heads * seen * (2 * RANK + ROPE),
    )


@pytest.mark.parametrize("tokens", [1, 512])
def test_mla_write(measure: Any, tokens: int) -> None:
    latents = mla.new_latent_cache(16, RANK, ROPE, BLOCK, torch.bfloat16)
    latent, k_rope = torch.randn(tokens, RANK + ROPE, dtype=torch.bfloat16).split([RANK, ROPE], -1)
    slots = torch.randperm(16 * BLOCK)[:tokens]
    measure(
        lambda: mla.mla_write(latent, k_rope, latents, slots),
        read=2 * tokens * (RANK + ROPE) * latents.itemsize,
    )


@pytest.mark.parametrize("kind", ["i8", "bf16"])
@pytest.mark.parametrize("tokens", [1, 8, 128])
@pytest.mark.parametrize(("columns", "rows"), [(HEAD, RANK), (RANK, HEAD)], ids=["queries", "results"])
@pytest.mark.parametrize("heads", [16, 128])
def test_heads_linear(measure: Any, heads: int, columns: int, rows: int, tokens: int, kind: str) -> None:
    x = torch.randn(tokens, heads, columns, dtype=torch.bfloat16)
    weight = torch.randn(heads, rows, columns, dtype=torch.bfloat16)
    if kind == "i8":
        q = torch.randint(-127, 128, weight.shape, dtype=torch.int8)
        weight = linear.pack_int8(q, torch.rand(heads, rows))
    measure(
        lambda: (
            linear.int8_heads_linear(x, weight, rows)
            if kind == "i8"
            else linear.dense_heads_linear(x, weight)
        ),
        read=weight.nbytes if tokens == 1 else 0,
        operations=2 * tokens * heads * rows * columns,
    )
