"""paged_attention compared: prompts with scaled_dot_product_attention, decode steps with a plain read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.ops.limits import Reader
from bench.ops.timing import cold, in_turn, on_huge_pages
from bench.records import Record, record
from torch_armllm.ops import attention, mla

HEADS = {"32/8x128": (32, 8, 128), "9/3x64": (9, 3, 64)}
CACHES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "int8": torch.int8}
PROMPT, CONTEXT, LATENT_CONTEXT, BLOCK = 2048, 8192, 4096, 16
RANK, ROPE = 512, 64


def filled_cache(blocks: int, kv_heads: int, size: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Returns keys, values and the scales of int8 for one layer, filled with random values."""
    caches = [t for t in attention.new_kv_cache(blocks, kv_heads, size, size, BLOCK, dtype) if t is not None]
    for cache in caches:
        cache.copy_(
            torch.randn(cache.shape) if cache.is_floating_point() else torch.randint(-99, 99, cache.shape)
        )
    return tuple(caches)


Sequence: TypeAlias = tuple[Tensor, Tensor, Tensor, int]


def one_sequence(queries: int, length: int) -> Sequence:
    """Returns block table, starts, lengths and maximum length of one sequence, blocks in random order."""
    blocks = torch.randperm(-(-length // BLOCK)).to(torch.int32)[None]
    start = torch.tensor([0, queries], dtype=torch.int32)
    return blocks, start, torch.tensor([length], dtype=torch.int32), length


def call(q: Tensor, caches: Callable[[], tuple[Tensor, ...]], length: int) -> Callable[[], Tensor]:
    """Returns a call of the op with ``q`` as the last tokens of one sequence."""
    sequence, scale = one_sequence(q.shape[0], length), q.shape[-1] ** -0.5

    def run() -> Tensor:
        k_cache, v_cache, *scales = caches()
        k_scales, v_scales = scales if scales else (None, None)
        return attention.paged_attention(
            q, k_cache, v_cache, *sequence, scale, k_scales=k_scales, v_scales=v_scales
        )

    return run


def _prompts(variant: str, cpu: str) -> list[Record]:
    records = []
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
            records.append(record("paged_attention", shape, name, variant, cpu, gops=gops[name], **peers))
    return records


def _decode(variant: str, cpu: str) -> list[Record]:
    records = []
    q_heads, kv_heads, size = HEADS["32/8x128"]
    for name, dtype in CACHES.items():
        first = filled_cache(CONTEXT // BLOCK, kv_heads, size, dtype)
        used = sum(t.nbytes for t in first)
        caches = cold(lambda first=first: tuple(on_huge_pages(t) for t in first), used)
        q = torch.randn(1, q_heads, size, dtype=torch.bfloat16)
        sides: dict[str, Any] = {"ours": call(q, caches, CONTEXT), "read": Reader()}
        seconds = in_turn(sides)
        rate, plain = used / seconds["ours"] / 1e9, sides["read"].bytes / seconds["read"] / 1e9
        peers = {"peer": "plain read", "peer_value": plain}
        shape = f"decode 32/8x128, context {CONTEXT}"
        records.append(record("paged_attention", shape, name, variant, cpu, gb_s=rate, **peers))
    return records


def _latent(variant: str, cpu: str) -> list[Record]:
    records = []
    blocks = LATENT_CONTEXT // BLOCK
    for heads in (16, 128):
        first = mla.new_latent_cache(blocks, RANK, ROPE, BLOCK, torch.bfloat16)
        first.copy_(torch.randn(first.shape))
        caches = cold(partial(on_huge_pages, first), first.nbytes)
        q_latent = torch.randn(1, heads, RANK, dtype=torch.bfloat16)
        q_rope = torch.randn(1, heads, ROPE, dtype=torch.bfloat16)
        sequence = one_sequence(1, LATENT_CONTEXT)
        query = torch.cat((q_latent, q_rope), -1)[0]

        def ours(
            q_latent: Tensor, q_rope: Tensor, caches: Callable[[], Tensor], sequence: Sequence
        ) -> Tensor:
            return mla.mla_attention(q_latent, q_rope, caches(), *sequence, 0.07)

        def products(query: Tensor, caches: Callable[[], Tensor]) -> Tensor:
            keys = caches().view(LATENT_CONTEXT, RANK + ROPE)
            return ((query @ keys.t()) * 0.07).softmax(-1) @ keys[:, :RANK]

        sides: dict[str, Any] = {
            "ours": partial(ours, q_latent, q_rope, caches, sequence),
            "torch": partial(products, query, caches),
            "read": Reader(),
        }
        seconds = in_turn(sides)
        rates = {name: first.nbytes / s / 1e9 for name, s in seconds.items()}
        rates["read"] = sides["read"].bytes / seconds["read"] / 1e9
        shape = f"decode {heads} heads, {RANK} + {ROPE}, context {LATENT_CONTEXT}"
        for name, peer in (("torch", "torch products"), ("read", "plain read")):
            peers: dict[str, Any] = {"peer": peer, "peer_value": rates[name]}
            records.append(record("mla_attention", shape, "bf16", variant, cpu, gb_s=rates["ours"], **peers))
    return records


def run(variant: str, cpu: str) -> list[Record]:
    """Measures prompts, decode steps, and decode steps over latents."""
    return _prompts(variant, cpu) + _decode(variant, cpu) + _latent(variant, cpu)
