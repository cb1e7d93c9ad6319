"""Rotary position embedding (Su et al., arXiv 2104.09864): the cos and sin table, and in-place rotation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_armllm.ops.declare import op, reference

__all__ = ["reference_rope", "reference_rope_table", "rope_", "rope_table"]


def _rope_table_result(a: Any) -> Any:
    tokens = a.positions.numel() if a.axes is None else a.positions.numel() // a.positions.shape[-1]
    shape = (tokens, a.inv_freq.shape[0])
    return a.inv_freq.new_empty(shape), a.inv_freq.new_empty(shape)


@op(_rope_table_result)
def rope_table(
    positions: Tensor,
    inv_freq: Tensor,
    scaling: float = 1.0,
    offset: int = 0,
    axes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes the cosine and sine of every position's angles.

    Args:
        positions: int64 of any shape, T values; with ``axes`` ``(…, T, n)``.
        inv_freq: ``(half,)`` float32, radians per position.
        scaling: factor of both results (YaRN's attention factor).
        offset: added to the positions.
        axes: int64 ``(half,)``, which of a token's n numbers each frequency turns by, as in M-RoPE, whose
            tokens have a time, a row and a column; None: they have one.

    Returns:
        cos and sin, float32 ``(T, half)``.

    Raises:
        RuntimeError: a dtype or shape is wrong, or an axis is not one of the n.
    """


@op()
def rope_(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, unzip: bool = False
) -> None:
    """Rotates the heads of queries and keys in place.

    Dimensions i and i + half of a head (2i and 2i + 1 if interleaved) form a pair; dimensions from 2 · half
    on do not change.  Results are computed in float32 and rounded once.

    Args:
        q: ``(..., T, heads, head_size)`` in float32, bfloat16 or float16.  Tokens and heads may be strided,
            as in a slice of a merged projection or of wider heads.  Other layouts are copied.
        k: ``(..., T, kv_heads, head_size)`` in the dtype of ``q``; ``kv_heads`` is 0 to rotate only queries.
        cos: float32 ``(T, half)``, half at most ``head_size / 2``.
        sin: as ``cos``.
        interleaved: whether adjacent dimensions form a pair.
        unzip: writes the rotated pair i to dimensions i and i + half (DeepSeek-V3); 2 · half is at most 512.

    Raises:
        RuntimeError: a shape or dtype is wrong.
    """


@reference("rope_table")
def reference_rope_table(a: Any) -> tuple[Tensor, Tensor]:
    """:func:`rope_table` in plain torch."""
    rows = a.positions.reshape(-1, 1) if a.axes is None else a.positions.flatten(0, -2)[:, a.axes]
    angles = ((rows + a.offset).float() * a.inv_freq).double()
    return (angles.cos() * a.scaling).float(), (angles.sin() * a.scaling).float()


def reference_rope(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, unzip: bool = False
) -> Tensor:
    """:func:`rope_` of queries or keys in plain float32 torch; returns a new tensor."""
    half = cos.shape[-1]
    rotary, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    a, b = (rotary[..., 0::2], rotary[..., 1::2]) if interleaved else rotary.split(half, dim=-1)
    rotated = (a * cos - b * sin, b * cos + a * sin)
    zipped = interleaved and not unzip
    joined = torch.stack(rotated, dim=-1).flatten(-2) if zipped else torch.cat(rotated, dim=-1)
    return torch.cat((joined.to(x.dtype), rest), dim=-1)
