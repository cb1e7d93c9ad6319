"""Embedding lookup that shares the INT8 weights of the tied output layer."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_armllm.ops.linear import unpack_int
from torch_armllm.system.dtypes import dtype_name

STEPS = 254
"""Number of steps of the rest per step of the output layer's integers."""


def split_rest(weight: Tensor, packed: Tensor) -> Tensor:
    """Quantizes the rounding errors of INT8 panels to eight further bits.

    Args:
        weight: ``(N, K)``, float32, bfloat16 or float16.
        packed: the same weight as panels of scheme ``i8``.

    Returns:
        int8 ``(N, K)``: ``round((w / s − q) · 254)``; then ``w ≈ s · (q + rest / 254)`` within ``s / 508``.
    """
    rest = torch.empty(weight.shape, dtype=torch.int8)
    step = max(1, (1 << 20) // max(weight.shape[1], 1) // 16) * 16
    for begin in range(0, weight.shape[0], step):
        rows = weight[begin : begin + step].float()
        panels = packed[begin // 16 : -(-(begin + rows.shape[0]) // 16)]
        q, scale = unpack_int(panels, rows.shape[0], rows.shape[1], "i8")
        left = rows / scale[:, None] - q.float()
        left = torch.where(scale[:, None] != 0, left, torch.zeros_like(left))
        rest[begin : begin + step] = torch.round(left * STEPS).clamp_(-127, 127).to(torch.int8)
    return rest


def split_embedding(ids: Tensor, weight: Tensor, rest: Tensor, dtype: torch.dtype) -> Tensor:
    """Looks up rows of an embedding that is stored as INT8 panels and a rest.

    Args:
        ids: int64, any shape.
        weight: uint8 ``(⌈vocabulary / 16⌉, bytes)``, panels of scheme ``i8``.
        rest: int8 ``(vocabulary, width)``, from `split_rest`.
        dtype: dtype of the result: float32, bfloat16 or float16.

    Returns:
        ``(*ids.shape, width)``: ``s · (254 q + rest) / 254``, rounded once to float32 and once to ``dtype``.

    Raises:
        RuntimeError: an id is outside the vocabulary, or a shape or dtype is wrong.
    """
    out: Tensor = torch.ops.armllm.split_embedding(ids, weight, rest, dtype_name(dtype))
    return out


def reference_split_embedding(ids: Tensor, weight: Tensor, rest: Tensor, dtype: torch.dtype) -> Tensor:
    """`split_embedding` in plain PyTorch."""
    q, scale = unpack_int(weight, rest.shape[0], rest.shape[1], "i8")
    whole = q[ids].float() * STEPS + rest[ids].float()
    return (whole * (scale[ids] / STEPS)[..., None]).to(dtype)


@torch.library.register_fake("armllm::split_embedding")
def _(ids: Tensor, weight: Tensor, rest: Tensor, dtype: str) -> Tensor:
    return rest.new_empty((*ids.shape, rest.shape[1]), dtype=getattr(torch, dtype))
