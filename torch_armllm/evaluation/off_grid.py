"""Noise that moves weights off the quantization grid of their checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_armllm.quant.layers import find_layers

_MAX_INTEGER = 7
"""The largest integer of a symmetric 4-bit grid."""


@torch.no_grad()
def move_off_grid(model: Any, seed: int = 0) -> None:
    """Adds uniform noise of one INT4 step to linear weights, in place.

    A checkpoint that was dequantized from 4 bits lies on its format's grid, which favors schemes with the
    same grid.  The step is 1/7 of the largest of 32 neighbors; noise is drawn in float32.

    Args:
        model: a model with float weights; changed in place.
        seed: seed of the noise.
    """
    generator = torch.Generator().manual_seed(seed)
    for layer in find_layers(model):
        if layer.kind == "linear":
            for weight in layer.weights():
                weight.copy_(_moved(weight.float(), generator))


def _moved(weight: Tensor, generator: torch.Generator) -> Tensor:
    groups = torch.nn.functional.pad(weight, (0, -weight.shape[1] % 32)).unflatten(1, (-1, 32))
    step = groups.abs().amax(dim=2, keepdim=True) / _MAX_INTEGER
    moved: Tensor = groups + (torch.rand(groups.shape, generator=generator) - 0.5) * step
    return moved.flatten(1)[:, : weight.shape[1]]
