"""Rotary position embedding (Su et al., arXiv 2104.09864): the table of angles, and the rotation in place."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["reference_rope", "reference_rope_table", "rope_", "rope_table"]


def rope_table(positions: Tensor, inv_freq: Tensor, scaling: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles.

    Args:
        positions: int64 of any shape, T values.
        inv_freq: ``(half,)`` float32, radians a position.
        scaling: multiplies both (YaRN's attention factor).

    Returns:
        cos and sin, float32 ``(T, half)``.

    Raises:
        RuntimeError: a dtype or shape does not fit.
    """
    cos, sin = torch.ops.armllm.rope_table(positions, inv_freq, scaling)
    return cos, sin


def rope_(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, unzip: bool = False
) -> None:
    """Turns the heads of queries and keys in place.

    Dimensions i and i + half of a head (2i and 2i + 1 if interleaved) form a pair; dimensions from 2 · half
    on stay as they are.  Computed in float32, rounded once.

    Args:
        q: ``(..., T, heads, head_size)`` in float32, bfloat16 or float16; tokens and heads may lie apart, as
            in a slice of a merged projection or of wider heads.  Any other layout works too, through a copy.
        k: ``(..., T, kv_heads, head_size)`` in the dtype of ``q``; no heads where queries turn alone.
        cos: float32 ``(T, half)``, half at most ``head_size / 2``.
        sin: as ``cos``.
        interleaved: whether neighbors form a pair.
        unzip: moves what pair i became to i and i + half (DeepSeek-V3); 2 · half is at most 512.

    Raises:
        RuntimeError: a shape or dtype does not fit.
    """
    torch.ops.armllm.rope_(q, k, cos, sin, interleaved, unzip)


def reference_rope_table(positions: Tensor, inv_freq: Tensor, scaling: float = 1.0) -> tuple[Tensor, Tensor]:
    """:func:`rope_table` in plain torch."""
    angles = positions.reshape(-1, 1).float() * inv_freq
    return (angles.double().cos() * scaling).float(), (angles.double().sin() * scaling).float()


def reference_rope(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, unzip: bool = False
) -> Tensor:
    """One side of :func:`rope_` in plain float32 torch, as a new tensor."""
    half = cos.shape[-1]
    turning, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    a, b = (turning[..., 0::2], turning[..., 1::2]) if interleaved else turning.split(half, dim=-1)
    turned = (a * cos - b * sin, b * cos + a * sin)
    zipped = interleaved and not unzip
    joined = torch.stack(turned, dim=-1).flatten(-2) if zipped else torch.cat(turned, dim=-1)
    return torch.cat((joined.to(x.dtype), rest), dim=-1)


@torch.library.register_fake("armllm::rope_table")
def _(positions: Tensor, inv_freq: Tensor, scaling: float = 1.0) -> tuple[Tensor, Tensor]:
    shape = (positions.numel(), inv_freq.shape[0])
    return inv_freq.new_empty(shape), inv_freq.new_empty(shape)


@torch.library.register_fake("armllm::rope_")
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, unzip: bool = False) -> None:
    return None
