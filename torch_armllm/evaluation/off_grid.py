"""Moving weights off the grid of the file that they came from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_armllm.quant.layers import find_layers

_LARGEST = 7
"""Of the integers of a symmetric 4-bit grid."""


@torch.no_grad()
def move_off_grid(model: Any, seed: int = 0) -> None:
    """Adds uniform noise of one INT4 step to linear weights, in place.

    A checkpoint that was dequantized from 4 bits lies on its format's grid, which favors that grid over all
    others.  The step is that of 32 neighbors whose largest is 7 steps; noise is drawn in float32.

    Args:
        model: with float weights.
        seed: of the noise; the same gives the same weights.
    """
    generator = torch.Generator().manual_seed(seed)
    for layer in find_layers(model):
        if layer.kind == "linear":
            for weight in layer.weights():
                weight.copy_(_moved(weight.float(), generator))


def _moved(weight: Tensor, generator: torch.Generator) -> Tensor:
    groups = torch.nn.functional.pad(weight, (0, -weight.shape[1] % 32)).unflatten(1, (-1, 32))
    step = groups.abs().amax(dim=2, keepdim=True) / _LARGEST
    moved: Tensor = groups + (torch.rand(groups.shape, generator=generator) - 0.5) * step
    return moved.flatten(1)[:, : weight.shape[1]]
