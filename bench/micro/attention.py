"""Attention on prompts and on decode steps, writes to caches, and weights by head.

Heads are those of SmolLM2 and of a model of 8B, of DeepSeek-V2-Lite (16) and V3 (128).
"""

from __future__ import annotations

import torch
from torch import Tensor

from bench.micro.call import Call, over, sequence
from bench.ops.attention import filled_cache
from torch_armllm.ops import attention, linear, mla

HEADS = {"9/3x64": (9, 3, 64), "32/8x128": (32, 8, 128)}
BLOCK, LATENT_BLOCK = 16, 64
RANK, ROPE = 512, 64
HEAD = 128
"""Values of a head before the absorbed projection of queries and after that of results."""
FLOATS = (torch.bfloat16, torch.float32)


def _sequences(count: int, new: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    blocks = -(-length // BLOCK)
    table = torch.randperm(count * blocks).to(torch.int32).view(count, blocks)
    start = torch.arange(count + 1, dtype=torch.int32) * new
    return table, start, torch.full((count,), length, dtype=torch.int32)


def _paged(heads: str, count: int, new: int, length: int, cache: torch.dtype) -> Call:
    q_heads, kv_heads, size = HEADS[heads]
    k, v = filled_cache(count * -(-length // BLOCK), kv_heads, size, cache)
    q, step = torch.randn(count * new, q_heads, size).bfloat16(), _sequences(count, new, length)
    read = 2 * count * length * kv_heads * size * cache.itemsize
    operations = 4 * q_heads * size * new * (new + 1) / 2
    return Call(
        lambda: attention.paged_attention(q, k, v, *step, length, size**-0.5),
        read=read if new == 1 else 0,
        operations=0 if new == 1 else operations,
    )


@over(heads=HEADS, cache=FLOATS)
def prompt(heads: str, cache: torch.dtype) -> Call:
    return _paged(heads, 1, 512, 512, cache)


@over(heads=HEADS, step=((1, 512), (1, 16384), (16, 2048)), cache=FLOATS)
def decode(heads: str, step: tuple[int, int], cache: torch.dtype) -> Call:
    return _paged(heads, step[0], 1, step[1], cache)


@over(heads=HEADS, tokens=(1, 512))
def kv_write(heads: str, tokens: int) -> Call:
    _, kv_heads, size = HEADS[heads]
    caches = attention.new_kv_cache(64, kv_heads, size, size, BLOCK, torch.bfloat16)
    k, v = torch.randn(2, tokens, kv_heads, size).bfloat16()
    slots = torch.randperm(64 * BLOCK)[:tokens]
    return Call(lambda: attention.kv_write(k, v, caches.k, caches.v, slots), read=2 * (k.nbytes + v.nbytes))


@over(heads=(16, 128), new=(1, 128), cache=(*FLOATS, torch.float16, torch.int8))
def mla_attention(heads: int, new: int, cache: torch.dtype) -> Call:
    length = 4096
    latents = mla.new_latent_cache(length // LATENT_BLOCK, RANK, ROPE, LATENT_BLOCK, cache)
    mla.mla_write(*torch.randn(length, RANK + ROPE).split([RANK, ROPE], -1), latents, torch.arange(length))
    q_latent, q_rope = torch.randn(new, heads, RANK + ROPE).bfloat16().split([RANK, ROPE], -1)
    step, seen = sequence(new, length, LATENT_BLOCK), new * length - new * (new - 1) // 2
    return Call(
        lambda: mla.mla_attention(q_latent, q_rope, latents, *step, length, 192**-0.5),
        read=latents.nbytes,
        operations=2 * heads * seen * (2 * RANK + ROPE),
    )


@over(tokens=(1, 512))
def mla_write(tokens: int) -> Call:
    latents = mla.new_latent_cache(16, RANK, ROPE, LATENT_BLOCK, torch.bfloat16)
    latent, k_rope = torch.randn(tokens, RANK + ROPE).bfloat16().split([RANK, ROPE], -1)
    slots = torch.randperm(16 * LATENT_BLOCK)[:tokens]
    read = 2 * tokens * (RANK + ROPE) * latents.itemsize
    return Call(lambda: mla.mla_write(latent, k_rope, latents, slots), read=read)


@over(heads=(16, 128), columns=(HEAD, RANK), tokens=(1, 8, 128), kind=("i8", "bf16"))
def heads_linear(heads: int, columns: int, tokens: int, kind: str) -> Call:
    """The absorbed projections: of queries (128 columns), and of results."""
    rows = HEAD + RANK - columns
    x = torch.randn(tokens, heads, columns).bfloat16()
    weight = torch.randn(heads, rows, columns).bfloat16()
    if kind == "i8":
        q = torch.randint(-127, 128, weight.shape, dtype=torch.int8)
        weight = linear.pack_int8(q, torch.rand(heads, rows))
    return Call(
        lambda: (
            linear.int8_heads_linear(x, weight, rows)
            if kind == "i8"
            else linear.dense_heads_linear(x, weight)
        ),
        read=weight.nbytes if tokens == 1 else 0,
        operations=2 * tokens * heads * rows * columns,
    )
