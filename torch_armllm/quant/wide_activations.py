"""The layers whose activations are INT16 instead of INT8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch_armllm.quant.layers import Layer
from torch_armllm.quant.recipe import Recipe, fits
from torch_armllm.quant.schemes.base import Scheme


def wide_layers(recipe: Recipe, layers: Sequence[Layer], schemes: Mapping[str, Scheme]) -> set[str]:
    """Returns the names of the layers that `Recipe.int16_activations` names.

    Raises:
        ValueError: a pattern fits no layer that can have INT16 activations.
    """
    able = [layer for layer in layers if layer.name in schemes and layer.kind in ("linear", "head")]
    chosen: set[str] = set()
    for pattern in recipe.int16_activations:
        fitting = {layer.name for layer in able if fits(layer, pattern)}
        if not fitting:
            raise ValueError(
                f"int16_activations: {pattern!r} fits no quantized linear layer of the model; experts and "
                "up-projections of latents have INT8 activations only"
            )
        chosen |= fitting
    return chosen
