"""Recipes of a given size: each layer gets as many bits as its rounding is worth."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from torch import Tensor, nn

from torch_armllm.quant.bit_allocation import Choice, allocate, joined
from torch_armllm.quant.layers import Layer
from torch_armllm.quant.methods.calibrated.sensitivity import LayerSensitivity, Sensitivity
from torch_armllm.quant.model_size import packed_bytes, saved_bytes
from torch_armllm.quant.quantization import Quantization
from torch_armllm.quant.recipe import Recipe, fits, kind_of
from torch_armllm.quant.schemes.registry import DEFAULT
from torch_armllm.system.files import parse_bytes

CANDIDATES = (DEFAULT, "g32i", "int3", "int6", "int8")
"""Schemes that `Recipe.bits` chooses from; all have exact integer sums."""
_SMALLER = (DEFAULT, "g32i", "int3")
_LARGER = (DEFAULT, "int6", "int8")
"""More bits for some layers at the price of 3 for others did not pay on stories15M."""


def candidates(run: Quantization) -> list[Layer]:
    """Returns the layers whose schemes `Recipe.bits` may choose."""
    return [
        layer
        for layer in run.selected
        if layer.kind in ("linear", "experts")
        and not any(fits(layer, pattern) for pattern in run.recipe.overrides)
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


def budget(run: Quantization, files: int = 0) -> float:
    """Returns how many bits the layers whose schemes `Recipe.bits` may choose can have together.

    Args:
        run: of a float model, which may be on the meta device, by a recipe with `Recipe.bits`.
        files: bytes of the files that are saved with the model's, such as its tokenizer's.

    Raises:
        ValueError: the smallest schemes need more bits, or the largest do not fill the size.
    """
    recipe, schemes, chosen = run.recipe, run.schemes, candidates(run)
    sizes = [[8.0 * packed_bytes(x, name) for name in CANDIDATES] for x in chosen]
    least, most = sum(map(min, sizes)), sum(map(max, sizes))
    if isinstance(recipe.bits, str) and (size := parse_bytes(recipe.bits)) is not None:
        rest = files + saved_bytes(run.model, run.layers, schemes, chosen)
        room = 8.0 * (size - rest)
        if not least <= room <= most:
            smallest, largest = math.ceil(rest + least / 8), math.floor(rest + most / 8)
            raise ValueError(
                f"bits={recipe.bits}: this model can have {_megabytes(smallest, math.ceil)} to "
                f"{_megabytes(largest, math.floor)}, {_megabytes(rest, math.ceil)} of them for all that has "
                "no choice, such as heads and embeddings"
            )
        return room
    chosen_names = {x.name for x in chosen}
    counted = [x for x in run.selected if x.kind != "head"]
    weights = sum(weight.numel() for layer in counted for weight in layer.weights())
    fixed = sum(8.0 * packed_bytes(x, schemes[x.name].name) for x in counted if x.name not in chosen_names)
    if isinstance(recipe.bits, str):
        usual = sum(8.0 * packed_bytes(x, recipe.scheme) for x in chosen)
        room = usual + float(recipe.bits) * weights
    else:
        assert recipe.bits is not None
        room = recipe.bits * weights - fixed
    if room < least:
        raise ValueError(
            f"bits={recipe.bits} is too little for this model: its layers need at least "
            f"{(fixed + least) / weights:.2f} bits a weight"
        )
    return room


def with_bits(recipe: Recipe, sensitivities: Sequence[LayerSensitivity], room: float) -> Recipe:
    """Returns the recipe with an override for each layer that is worth other bits than `Recipe.scheme` has.

    Args:
        recipe: a recipe with `Recipe.bits`.
        sensitivities: of the layers whose schemes may be chosen.
        room: see `budget`.
    """
    choices = [
        Choice((x.layer.name,), {name: 8.0 * packed_bytes(x.layer, name) for name in CANDIDATES}, x.loss)
        for x in sensitivities
    ]
    names = _LARGER if room >= sum(x.size[recipe.scheme] for x in choices) else _SMALLER
    units = joined([x.among(names) for x in choices], [_unit(x) for x in sensitivities])
    chosen = allocate(units, room)
    raised = {name: scheme for name, scheme in chosen.items() if scheme != recipe.scheme}
    return replace(recipe, overrides={**raised, **recipe.overrides})


def _unit(sensitivity: LayerSensitivity) -> Hashable:
    """Returns a key that gate and up projection of an MLP share: with one scheme they run as one op."""
    layer = sensitivity.layer
    if layer.kind == "linear" and kind_of(layer) in ("mlp", "shared_experts"):
        return sensitivity.inputs, layer.weights()[0].shape
    return layer.name


def _megabytes(count: int, rounded: Callable[[float], int]) -> str:
    """Returns a size with three digits behind the point, so that what it names can be asked for."""
    return f"{rounded(count / 1000) / 1000:.3f} MB"
