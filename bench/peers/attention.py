"""paged_attention beside scaled_dot_product_attention on prompts, and beside a plain read on decode steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_armllm.ops import attention

from ..records import Record, record, table
from .limits import Reader
from .timing import cold, in_turn, on_huge_pages

HEADS = {"32/8x128": (32, 8, 128), "9/3x64": (9, 3, 64)}
CACHES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "int8": torch.int8}
PROMPT, CONTEXT, BLOCK = 2048, 8192, 16


def filled_cache(blocks: int, kv_heads: int, size: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Keys, values and the scales of int8, of one layer, with random values in them."""
    caches = [t for t in attention.new_kv_cache(blocks, kv_heads, size, size, BLOCK, dtype) if t is not None]
    for cache in caches:
        cache.copy_(
            torch.randn(cache.shape) if cache.is_floating_point() else torch.randint(-99, 99, cache.shape)
        )
    return tuple(caches)


def call(q: Tensor, caches: Callable[[], tuple[Tensor, ...]], length: int) -> Callable[[], Tensor]:
    """One sequence whose last tokens are ``q``, blocks in random order."""
    table = torch.randperm(-(-length // BLOCK)).to(torch.int32)[None]
    start = torch.tensor([0, q.shape[0]], dtype=torch.int32)
    lengths = torch.tensor([length], dtype=torch.int32)
    scale = q.shape[-1] ** -0.5

    def run() -> Tensor:
        k_cache, v_cache, *scales = caches()
        k_scales, v_scales = scales if scales else (None, None)
        return attention.paged_attention(
            *(q, k_cache, v_cache, table, start, lengths, length, scale),
            k_scales=k_scales,
            v_scales=v_scales,
        )

    return run


def _prompts(variant: str, cpu: str) -> list[Record]:
    found, rows = [], []
    for heads, (q_heads, kv_heads, size) in HEADS.items():
        q = torch.randn(PROMPT, q_heads, size, dtype=torch.bfloat16)
        k, v = torch.randn(2, 1, kv_heads, PROMPT, size, dtype=torch.bfloat16)
        query = q.transpose(0, 1)[None].contiguous()
        sides: dict[str, Callable[[], Any]] = {
            "SDPA": lambda query=query, k=k, v=v: F.scaled_dot_product_attention(
                query, k, v, is_causal=True, enable_gqa=True
            )
        }
        for name, dtype in CACHES.items():
            caches = filled_cache(PROMPT // BLOCK, kv_heads, size, dtype)
            sides[name] = call(q, lambda caches=caches: caches, PROMPT)
        seconds = in_turn(sides, rounds=5)
        work = 4e-9 * q_heads * size * PROMPT * (PROMPT + 1) / 2
        gops = {name: work / s for name, s in seconds.items()}
        for name in CACHES:
            peers = {"peer": "SDPA bf16", "peer_value": gops["SDPA"]}
            shape = f"prompt of {PROMPT}, {heads}"
            found.append(record("paged_attention", shape, name, variant, cpu, gops=gops[name], **peers))
            ratio = gops[name] / gops["SDPA"]
            rows.append([heads, name, seconds[name] * 1e3, gops[name], gops["SDPA"], ratio])
    print(f"\npaged_attention, causal prompt of {PROMPT} tokens, all cores: GOP/s beside SDPA in bfloat16\n")
    print(table(["heads", "cache", "ms", "paged_attention", "SDPA", "ratio"], rows))
    return found


def _decode(variant: str, cpu: str) -> list[Record]:
    found, rows = [], []
    q_heads, kv_heads, size = HEADS["32/8x128"]
    for name, dtype in CACHES.items():
        first = filled_cache(CONTEXT // BLOCK, kv_heads, size, dtype)
        used = sum(t.nbytes for t in first)
        caches = cold(lambda first=first: tuple(on_huge_pages(t) for t in first), used)
        q = torch.randn(1, q_heads, size, dtype=torch.bfloat16)
        sides = {"ours": call(q, caches, CONTEXT), "read": Reader(used)}
        seconds = in_turn(sides)
        rate, plain = used / seconds["ours"] / 1e9, used / seconds["read"] / 1e9
        peers = {"peer": "plain read", "peer_value": plain}
        shape = f"decode 32/8x128, context {CONTEXT}"
        found.append(record("paged_attention", shape, name, variant, cpu, gb_s=rate, **peers))
        rows.append([name, seconds["ours"] * 1e3, rate, plain, rate / plain])
    print(
        f"\npaged_attention, decode at context {CONTEXT}, batch 1, 32/8x128, all cores: GB/s of the cache\n"
    )
    print(table(["cache", "ms", "paged_attention", "plain read", "share"], rows))
    return found


def run(variant: str, cpu: str) -> list[Record]:
    """Prints its tables."""
    return _prompts(variant, cpu) + _decode(variant, cpu)
