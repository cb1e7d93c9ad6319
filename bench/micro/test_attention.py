"""paged_attention on prompts and on decode steps, with SmolLM2's heads and an 8B model's; kv_write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torch_armllm.ops import attention

HEADS = {"9/3x64": (9, 3, 64), "32/8x128": (32, 8, 128)}
BLOCK = 16


def sequences(
    count: int, new: int, length: int, heads: tuple[int, int, int], cache: torch.dtype
) -> tuple[Tensor, ...]:
    """Returns q, caches, table, query_start and seq_lens of ``count`` sequences, blocks in random order."""
    q_heads, kv_heads, size = heads
    blocks = -(-length // BLOCK)
    kv_cache = attention.new_kv_cache(count * blocks, kv_heads, size, size, BLOCK, cache)
    for block in range(count * blocks):
        kv_cache.k[block].copy_(torch.randn(kv_cache.k.shape[1:]))
        kv_cache.v[block].copy_(torch.randn(kv_cache.v.shape[1:]))
    table = torch.randperm(count * blocks).to(torch.int32).view(count, blocks)
    q = torch.randn(count * new, q_heads, size, dtype=torch.bfloat16)
    start = torch.arange(count + 1, dtype=torch.int32) * new
    return q, kv_cache.k, kv_cache.v, table, start, torch.full((count,), length, dtype=torch.int32)


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("heads", HEADS)
def test_prompt(measure: Any, heads: str, cache: torch.dtype) -> None:
    tokens = 512
    q_heads, _, size = HEADS[heads]
    arguments = sequences(1, tokens, tokens, HEADS[heads], cache)
    operations = 4 * q_heads * size * tokens * (tokens + 1) / 2
    measure(lambda: attention.paged_attention(*arguments, tokens, size**-0.5), operations=operations)


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("count", "length"), [(1, 512), (1, 16384), (16, 2048)])
@pytest.mark.parametrize("heads", HEADS)
def test_decode(measure: Any, heads: str, count: int, length: int, cache: torch.dtype) -> None:
    _, kv_heads, size = HEADS[heads]
    arguments = sequences(count, 1, length, HEADS[heads], cache)
    read = 2 * count * length * kv_heads * size * cache.itemsize
    measure(lambda: attention.paged_attention(*arguments, length, size**-0.5), read=read)


@pytest.mark.parametrize("tokens", [1, 512])
@pytest.mark.parametrize("heads", HEADS)
def test_kv_write(measure: Any, heads: str, tokens: int) -> None:
    _, kv_heads, size = HEADS[heads]
    caches = attention.new_kv_cache(64, kv_heads, size, size, BLOCK, torch.bfloat16)
    k, v = torch.randn(2, tokens, kv_heads, size, dtype=torch.bfloat16)
    slots = torch.randperm(64 * BLOCK)[:tokens]
    measure(lambda: attention.kv_write(k, v, caches.k, caches.v, slots), read=2 * (k.nbytes + v.nbytes))
