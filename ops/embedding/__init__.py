"""Embedding lookup that shares the INT8 or 6-bit weights of the tied output layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_armllm.ops.declare import fake, reference
from torch_armllm.ops.linear import rotate_groups, unpack_int
from torch_armllm.ops.linear.packed_layout import unpack_multipliers
from torch_armllm.ops.linear.schemes import GROUP
from torch_armllm.system.dtypes import dtype_name

STEPS = 254
"""Number of steps of the rest per step of the output layer's integers."""


def split_rest(weight: Tensor, packed: Tensor, scheme: str = "i8") -> Tensor:
    """Quantizes the rounding errors of INT8 or 6-bit panels to eight further bits.

    Args:
        weight: ``(N, K)``, float32, bfloat16 or float16.
        packed: the same weight as panels.
        scheme: scheme of the panels, ``i8`` or ``int6``.

    Returns:
        int8 ``(N, K)``: ``round((w / s − q) · 254)``; then ``w ≈ s · (q + rest / 254)`` within ``s / 508``,
        where s is the step of the weight's row, or of its group for ``int6``.
    """
    rest = torch.empty(weight.shape, dtype=torch.int8)
    step = max(1, (1 << 20) // max(weight.shape[1], 1) // 16) * 16
    for begin in range(0, weight.shape[0], step):
        rows = weight[begin : begin + step].float()
        panels = packed[begin // 16 : -(-(begin + rows.shape[0]) // 16)]
        q, scale = unpack_int(panels, rows.shape[0], rows.shape[1], scheme)
        left = rows / scale[:, None] - q.float()
        left = torch.where(scale[:, None] != 0, left, torch.zeros_like(left))
        if scheme == "int6":
            left /= _steps_per_row_scale(panels, *rows.shape)
        rest[begin : begin + step] = torch.round(left * STEPS).clamp_(-127, 127).to(torch.int8)
    return rest


def split_embedding(
    ids: Tensor,
    weight: Tensor,
    rest: Tensor,
    dtype: torch.dtype,
    scheme: str = "i8",
    rotated: bool = False,
) -> Tensor:
    """Looks up rows of an embedding that is stored as panels and a rest.

    Args:
        ids: int64, any shape.
        weight: uint8 ``(⌈vocabulary / 16⌉, bytes)``, panels.
        rest: int8 ``(vocabulary, width)``, from `split_rest`.
        dtype: dtype of the result: float32, bfloat16 or float16.
        scheme: scheme of the panels, ``i8`` or ``int6``.
        rotated: the panels are those of a rotated output layer, see `int4_linear`; rows are rotated back.

    Returns:
        ``(*ids.shape, width)``: ``s · (254 q + rest) / 254``, rounded once to float32 and once to ``dtype``.

    Raises:
        RuntimeError: an id is outside the vocabulary, or a shape or dtype is wrong.
    """
    out: Tensor = torch.ops.armllm.split_embedding(ids, weight, rest, dtype_name(dtype), scheme, rotated)
    return out


fake(
    "split_embedding",
    lambda a: a.rest.new_empty((*a.ids.shape, a.rest.shape[1]), dtype=getattr(torch, a.dtype)),
)


@reference("split_embedding")
def reference_split_embedding(a: Any) -> Tensor:
    """`split_embedding` in plain PyTorch."""
    rows, columns = a.rest.shape
    q, scale = unpack_int(a.weight, rows, columns, a.scheme)
    further = a.rest.float()
    if a.scheme == "int6":
        further = further * _steps_per_row_scale(a.weight, rows, columns)
    whole = q[a.ids].float() * STEPS + further[a.ids]
    if a.rotated:
        whole = rotate_groups(whole) / GROUP
    result: Tensor = whole * (scale[a.ids] / STEPS)[..., None]
    return result.to(a.dtype)


def _steps_per_row_scale(panels: Tensor, rows: int, columns: int) -> Tensor:
    """Returns the step of each weight of scheme ``int6`` in units of its row scale: float32 ``(N, K)``."""
    multipliers = unpack_multipliers(panels, rows, columns, "int6")
    return multipliers.float().repeat_interleave(GROUP, 1)[:, :columns]
