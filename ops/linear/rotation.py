"""Rotation of a layer's inputs, and of its weight's columns, by groups of 32."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_armllm.ops.linear.schemes import GROUP

_BITS = GROUP.bit_length() - 1


def rotate_groups(x: Tensor) -> Tensor:
    """Multiplies each group of 32 elements by the Hadamard matrix of ones and minus ones, in float32.

    Twice is 32 times the input.  Elements 16, 8, 4, 2 and 1 apart become their sum and their difference, in
    this order, as in the kernels.

    Args:
        x: ``(..., K)`` of any float type; K is a multiple of 32.

    Returns:
        float32 ``(..., K)``.
    """
    parts = x.to(torch.float32).unflatten(-1, (-1, *(2,) * _BITS))
    for dimension in range(-_BITS, 0):
        low, high = parts.unbind(dimension)
        parts = torch.stack([low + high, low - high], dimension)
    rotated: Tensor = parts.flatten(-_BITS - 1)
    return rotated
