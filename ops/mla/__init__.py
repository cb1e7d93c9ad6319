"""Multi-head latent attention in its absorbed form, on a paged cache with one latent per token."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_armllm.ops.attention.cache_layout import BLOCK_SIZES, zeros_on_huge_pages
from torch_armllm.ops.declare import op
from torch_armllm.ops.mla.reference import latents_by_token, reference_mla_attention, reference_mla_write

__all__ = [
    "latent_width",
    "latents_by_token",
    "mla_attention",
    "mla_write",
    "new_latent_cache",
    "reference_mla_attention",
    "reference_mla_write",
]


def latent_width(size: int, dtype: torch.dtype) -> int:
    """Elements of a token's row in a cache.

    Args:
        size: elements of the latent and of the rotated key together.
        dtype: dtype of the cache; rows of int8 end with two float32 scales.
    """
    return size + 2 * torch.float32.itemsize if dtype == torch.int8 else size


def new_latent_cache(blocks: int, rank: int, rope_size: int, block_size: int, dtype: torch.dtype) -> Tensor:
    """Allocates an empty cache of one layer.

    Args:
        blocks: number of blocks.
        rank: elements of a latent, ``kv_lora_rank``.
        rope_size: elements of the rotated key, which all heads share.
        block_size: positions per block, one of :data:`torch_armllm.ops.attention.BLOCK_SIZES`.
        dtype: float32, bfloat16, float16 or int8.

    Returns:
        ``(blocks, block_size, rank + rope_size)``, zeros: a token's latent, then its rotated key.  A row of
        int8 has 8 more bytes: the float32 scales of the latent and of the rotated key.

    Raises:
        ValueError: the block size or dtype is not supported.
    """
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block size {block_size} is not one of {', '.join(map(str, BLOCK_SIZES))}")
    if dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.int8):
        raise ValueError(f"cache dtype {dtype} is not one of float32, bfloat16, float16, int8")
    return zeros_on_huge_pages((blocks, block_size, latent_width(rank + rope_size, dtype)), dtype)


@op()
def mla_write(latent: Tensor, k_rope: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Writes new latents and rotated keys into the cache.

    In an int8 cache a latent is ``integers · scale`` with ``scale = max |x| / 127``, and so is a rotated key.
    If one of its values is not finite, all become NaN.

    Args:
        latent: ``(T, rank)``, float32, bfloat16 or float16, normalized; tokens may be strided, as in a slice
            of the projection that computes latents and keys.
        k_rope: ``(T, rope_size)``, the same dtypes.
        cache: ``(blocks, block_size, rank + rope_size)`` (:func:`new_latent_cache`); changed in place, with
            values rounded to its dtype.
        slots: int64 ``(T,)``: ``block · block_size + offset`` of each token; negative slots are not written.

    Raises:
        RuntimeError: a shape or dtype is wrong, or a slot is past the end of the cache.
    """


@op(lambda a: a.q_latent.new_empty(a.q_latent.shape))
def mla_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    scale: float,
    sinks: Tensor | None = None,
    selected: Tensor | None = None,
    window: int = 0,
) -> Tensor:
    """Computes causal softmax attention of each sequence's last tokens over the sequence's cached latents.

    The score of a query and a position is ``scale · (q_latent · latent + q_rope · k_rope)``; the result is
    the weighted sum of latents.  The projections from latents to keys and values are not applied to the
    cache, but once to the query (``q_latent = q_nope · W_uk``) and once to the result (``· W_uv``).

    Rows of int8 are expanded to bfloat16, which the products then compute with.

    Args:
        q_latent: ``(T, heads, rank)``, float32, bfloat16 or float16; tokens may be strided.
        q_rope: ``(T, heads, rope_size)``, rotated, of the same dtype.
        cache: ``(blocks, block_size, rank + rope_size)`` (:func:`new_latent_cache`), the new tokens included
            (:func:`mla_write`).
        block_table: int32 ``(B, ≥ blocks per sequence)``, the cache blocks of each sequence in order.
        query_start: int32 ``(B + 1,)``, index of the first packed token of each sequence, then ``T``.
        seq_lens: int32 ``(B,)``, positions of each sequence in the cache, including the new tokens.
        max_seq_len: at least the largest value of ``seq_lens``.
        scale: factor of the scores, ``(nope_size + rope_size) ** -0.5`` of the expanded heads.
        sinks: float32 ``(heads,)``: logits that enter the sum of the softmax but carry no value.
        selected: int32 ``(T, n)``, the positions that tokens of sequences of more than ``n`` positions attend
            to, as :func:`torch_armllm.ops.select.select_tokens` returns them; None: all positions.
        window: number of visible positions up to a token's own; 0 for all.  Not together with ``selected``.

    Returns:
        ``(T, heads, rank)`` in the dtype of ``q_latent``, contiguous.  A token's result has the same bits
        alone, in a chunk or in a batch, with any number of threads.

    Raises:
        RuntimeError: a shape, dtype, length, block number or selected position is wrong; the message names
            the value.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1, with the up-projections absorbed.
    """
