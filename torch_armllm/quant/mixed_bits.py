"""Recipes of a given size: each layer gets as many bits as its rounding is worth."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from torch_armllm.quant.bit_allocation import Choice, allocate, joined
from torch_armllm.quant.layers import Layer
from torch_armllm.quant.methods.calibrated.sensitivity import LayerSensitivity, Sensitivity
from torch_armllm.quant.packing import empty_panels
from torch_armllm.quant.recipe import Recipe, fits, kind_of
from torch_armllm.quant.schemes.base import Scheme
from torch_armllm.quant.schemes.registry import DEFAULT

CANDIDATES = (DEFAULT, "g32i", "int3", "int6", "int8")
"""Schemes that `Recipe.bits` chooses from; all have exact integer sums."""
_SMALLER = (DEFAULT, "g32i", "int3")
_LARGER = (DEFAULT, "int6", "int8")
"""More bits for some layers at the price of 3 for others did not pay on stories15M."""


def candidates(recipe: Recipe, layers: Sequence[Layer], schemes: Mapping[str, Scheme]) -> list[Layer]:
    """Returns the layers whose schemes `Recipe.bits` may choose."""
    return [
        layer
        for layer in layers
        if layer.name in schemes
        and layer.kind in ("linear", "experts")
        and not any(fits(layer, pattern) for pattern in recipe.overrides)
    ]


def measured(model: nn.Module, layers: Sequence[Layer], tokens: Tensor) -> list[LayerSensitivity]:
    """Returns the sensitivities of layers of a model in memory.

    Raises:
        NotByLayersError: the decoder layers do not run one after the other.
    """
    sensitivity = Sensitivity(model, layers, CANDIDATES, tokens)
    for _ in range(sensitivity.stages):
        sensitivity.run()
    return sensitivity.result()


def with_bits(
    recipe: Recipe,
    layers: Sequence[Layer],
    schemes: Mapping[str, Scheme],
    sensitivities: Sequence[LayerSensitivity],
) -> Recipe:
    """Returns the recipe with an override for each layer that is worth more bits than `Recipe.scheme` has.

    Args:
        recipe: a recipe with `Recipe.bits`.
        layers: all layers of the model.
        schemes: the schemes that the recipe assigns, by layer name; heads count for nothing.
        sensitivities: of the layers whose schemes may be chosen.

    Raises:
        ValueError: the smallest schemes need more bits.
    """
    assert recipe.bits is not None
    counted = [x for x in layers if x.name in schemes and x.kind != "head"]
    measured = {x.layer.name for x in sensitivities}
    weights = sum(weight.numel() for layer in counted for weight in layer.weights())
    fixed = sum(8 * _bytes(x, schemes[x.name].name) for x in counted if x.name not in measured)
    choices = [
        Choice((x.layer.name,), {name: 8.0 * _bytes(x.layer, name) for name in CANDIDATES}, x.loss)
        for x in sensitivities
    ]
    usual = fixed + sum(x.size[recipe.scheme] for x in choices)
    size = usual + float(recipe.bits) * weights if isinstance(recipe.bits, str) else recipe.bits * weights
    names = _LARGER if size >= usual else _SMALLER
    units = joined([x.among(names) for x in choices], [_unit(x) for x in sensitivities])
    try:
        chosen = allocate(units, size - fixed)
    except ValueError:
        least = fixed + sum(min(x.size.values()) for x in choices)
        raise ValueError(
            f"bits={recipe.bits} is too little for this model: its layers need at least "
            f"{least / weights:.2f} bits a weight"
        ) from None
    raised = {name: scheme for name, scheme in chosen.items() if scheme != recipe.scheme}
    return replace(recipe, overrides={**raised, **recipe.overrides})


def _unit(sensitivity: LayerSensitivity) -> Hashable:
    """Returns a key that gate and up projection of an MLP share: with one scheme they run as one op."""
    layer = sensitivity.layer
    if layer.kind == "linear" and kind_of(layer) in ("mlp", "shared_experts"):
        return sensitivity.inputs, layer.weights()[0].shape
    return layer.name


def _bytes(layer: Layer, scheme: str) -> int:
    """Returns the packed size of a layer's matrices."""
    total = 0
    for matrices in layer.matrices():
        rows, columns = matrices[0].shape
        total += empty_panels((len(matrices),), rows, columns, scheme).nbytes
    return total
