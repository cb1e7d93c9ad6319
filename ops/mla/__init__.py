"""Multi-head latent attention in its absorbed form, on a paged cache that holds one latent a token."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_armllm.ops.attention.cache_layout import BLOCK_SIZES, zeros_on_huge_pages
from torch_armllm.ops.mla.reference import reference_mla_attention, reference_mla_write

__all__ = [
    "mla_attention",
    "mla_write",
    "new_latent_cache",
    "reference_mla_attention",
    "reference_mla_write",
]


def new_latent_cache(blocks: int, rank: int, rope_size: int, block_size: int, dtype: torch.dtype) -> Tensor:
    """An empty cache of one layer.

    Args:
        blocks: number of blocks.
        rank: elements of a latent, ``kv_lora_rank``.
        rope_size: elements of the key that all heads share and that carries the position.
        block_size: positions a block, one of :data:`torch_armllm.ops.attention.BLOCK_SIZES`.
        dtype: float32, bfloat16 or float16.

    Returns:
        ``(blocks, block_size, rank + rope_size)``, zeros: a token's latent, then its rotated key.

    Raises:
        ValueError: the block size or dtype is none of those.
    """
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block size {block_size} is not one of {', '.join(map(str, BLOCK_SIZES))}")
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"cache dtype {dtype} is not one of float32, bfloat16, float16")
    return zeros_on_huge_pages((blocks, block_size, rank + rope_size), dtype)


def mla_write(latent: Tensor, k_rope: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Writes new latents and rotated keys into the cache.

    Args:
        latent: ``(T, rank)``, float32, bfloat16 or float16, normalized; tokens may lie apart, as in a
            slice of the projection that gives both.
        k_rope: ``(T, rope_size)``, the same dtypes.
        cache: ``(blocks, block_size, rank + rope_size)``; changed in place, rounded to its dtype.
        slots: int64 ``(T,)``: ``block · block_size + offset`` of each token; negative: not written.

    Raises:
        RuntimeError: shapes or dtypes do not fit, or a slot lies past the cache.
    """
    torch.ops.armllm.mla_write(latent, k_rope, cache, slots)


def mla_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    scale: float,
) -> Tensor:
    """Causal softmax attention of the last tokens of each sequence on the latents that the cache holds of it.

    The score of a query and a position is ``scale · (q_latent · latent + q_rope · k_rope)`` and the result
    the weighted sum of latents: the projections from latents to keys and values are not applied to the cache,
    but once to the query (``q_latent = q_nope · W_uk``) and once to the result (``· W_uv``).

    Args:
        q_latent: ``(T, heads, rank)``, float32, bfloat16 or float16; tokens may lie apart.
        q_rope: ``(T, heads, rope_size)``, rotated, of the same dtype.
        cache: ``(blocks, block_size, rank + rope_size)`` (:func:`new_latent_cache`), the new tokens included
            (:func:`mla_write`).
        block_table: int32 ``(B, ≥ blocks a sequence)``, the cache blocks of each sequence in order.
        query_start: int32 ``(B + 1,)``, the first packed token of each sequence; it ends with ``T``.
        seq_lens: int32 ``(B,)``, positions of each sequence in the cache, the new tokens included.
        max_seq_len: at least the largest of them.
        scale: factor of the scores, ``(nope_size + rope_size) ** -0.5`` of the expanded heads.

    Returns:
        ``(T, heads, rank)`` in the dtype of ``q_latent``, contiguous.  A token's result has the same bits
        alone, in a chunk or in a batch, with any number of threads.

    Raises:
        RuntimeError: shapes, dtypes, lengths or block numbers do not fit; the message names the value.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1, with the up-projections absorbed.
    """
    result: Tensor = torch.ops.armllm.mla_attention(
        q_latent, q_rope, cache, block_table, query_start, seq_lens, max_seq_len, scale
    )
    return result


@torch.library.register_fake("armllm::mla_write")
def _mla_write_fake(latent: Tensor, k_rope: Tensor, cache: Tensor, slots: Tensor) -> None:
    return None


@torch.library.register_fake("armllm::mla_attention")
def _mla_attention_fake(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    scale: float,
) -> Tensor:
    return q_latent.new_empty(q_latent.shape)
