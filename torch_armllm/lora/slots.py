"""Slots for adapters in the quantized linear layers of a model."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_armllm.hf.base_model import base_model_of
from torch_armllm.ops.lora import BLOCK, lora_blocks, lora_linear
from torch_armllm.quant.modules.linear import QuantLinear


class AdapterSlots(NamedTuple):
    """Sizes of the slots of a model.

    Attributes:
        slots: most adapters at a time.
        rank: highest rank of an adapter.
        rows: most tokens of a step.
    """

    slots: int
    rank: int
    rows: int


class LoraSlots(nn.Module):
    """Adds to each row of a layer's result what the row's adapter says.

    Attributes:
        a: ``(slots, R, in_features)``: the first factor of each adapter.
        b: ``(slots, ⌈out_features / 64⌉, R, 64)``: the second one, transposed and scaled, in blocks.
        in_features, out_features: sizes of the layer.
        ranks: int32 ``(slots,)``: ranks in use; 0: the slot's adapter leaves the layer alone.
        adapters: int32 ``(L,)``: slot of each row of the step, −1 for none; one tensor for all layers.
    """

    a: Tensor
    b: Tensor
    ranks: Tensor
    adapters: Tensor

    def __init__(self, layer: QuantLinear, sizes: AdapterSlots, dtype: torch.dtype, rows: Tensor) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        blocks = -(-layer.out_features // BLOCK)
        shapes = {"a": (sizes.rank, layer.in_features), "b": (blocks, sizes.rank, BLOCK)}
        for name, shape in shapes.items():
            # written at once, so that the memory counts as used before the KV cache is sized
            factor = torch.empty(sizes.slots, *shape, dtype=dtype).zero_()
            self.register_buffer(name, factor, persistent=False)
        self.register_buffer("ranks", torch.zeros(sizes.slots, dtype=torch.int32), persistent=False)
        self.register_buffer("adapters", rows, persistent=False)

    def forward(self, base: Tensor, x: Tensor) -> Tensor:
        """Returns the layer's result ``base`` (…, out_features) with its rows' adapters added."""
        return lora_linear(base, x, self.a, self.b, self.ranks, self.adapters)

    @property
    def slots(self) -> int:
        """Number of adapters that fit."""
        return len(self.ranks)

    def write(self, slot: int, a: Tensor, b: Tensor) -> None:
        """Writes an adapter's factors ``(r, in_features)`` and ``(r, out_features)`` to a slot."""
        rank = len(a)
        self.a[slot, :rank], self.b[slot, :, :rank], self.ranks[slot] = a, lora_blocks(b), rank

    def clear(self, slot: int) -> None:
        """Empties a slot."""
        self.ranks[slot] = 0


def add_slots(model: Any, sizes: AdapterSlots) -> None:
    """Gives the quantized linear layers of a model's base model slots for adapters.

    Args:
        model: a causal language model whose layers are quantized.
        sizes: of the slots.

    Raises:
        ValueError: no layer is quantized, or quantization has scaled the channels between layers: an adapter
            would read and write other numbers than those that it was trained on.
    """
    base = base_model_of(model)
    _check_channels(model)
    layers = [m for m in base.modules() if isinstance(m, QuantLinear) and m.blocks == 1]
    if not layers:
        raise ValueError("enable_lora needs quantized linear layers, and this model has none")
    adapters = torch.full((sizes.rows,), -1, dtype=torch.int32)
    for layer in layers:
        layer.lora = LoraSlots(layer, sizes, model.dtype, adapters)


def _check_channels(model: Any) -> None:
    config = getattr(model.config, "quantization_config", None)
    if config is None or config.source is not None:  # another tool's integers keep their channels
        return
    recipe = config.recipe
    if recipe.method == "rtn" or (recipe.method in ("mse", "gptq") and recipe.importance is False):
        return
    raise ValueError(
        f"enable_lora: quantization by {recipe.method!r} has scaled this model's channels, which adapters do "
        "not know; quantize the float model with Recipe(importance=False), as LLM(float folder, "
        "enable_lora=True) does, or write the folder with method 'rtn'"
    )


def slots_of(model: Any) -> dict[str, LoraSlots]:
    """Returns the slots of a model's layers, by the layers' names; none if it has no slots."""
    layers = ((name, m) for name, m in model.named_modules() if isinstance(m, QuantLinear))
    return {name: layer.lora for name, layer in layers if isinstance(layer.lora, LoraSlots)}
