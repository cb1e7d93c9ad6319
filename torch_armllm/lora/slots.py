"""Slots for adapters in the quantized linear layers of a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_armllm.hf.base_model import base_model_of
from torch_armllm.lora.dtypes import LoraDtype
from torch_armllm.ops.lora import BLOCK, lora_blocks, lora_integers, lora_linear
from torch_armllm.quant.modules.linear import QuantLinear
from torch_armllm.system.huge_pages import prefer_huge

_LINE = 64
"""Elements between the beginnings of factors: whole cache lines."""


class AdapterSlots(NamedTuple):
    """Sizes of the slots of a model.

    Attributes:
        slots: most adapters at a time.
        rank: highest rank of an adapter.
        rows: most tokens of a step.
        dtype: of the factors.
    """

    slots: int
    rank: int
    rows: int
    dtype: LoraDtype = "auto"


class LoraSlots(nn.Module):
    """Adds to each row of a layer's result what the row's adapter says.

    Attributes:
        a: ``(slots, R, in_features)``: the first factor of each adapter; or integers, see `lora_linear`.
        b: ``(slots, ⌈out_features / 64⌉, R, 64)``: the second one, transposed and scaled, in blocks; or
            integers.
        in_features, out_features: sizes of the layer.
        ranks: int32 ``(slots,)``: ranks in use; 0: the slot's adapter leaves the layer alone.
        adapters: int32 ``(L,)``: slot of each row of the step, −1 for none; one tensor for all layers.
    """

    a: Tensor
    b: Tensor
    ranks: Tensor
    adapters: Tensor

    def __init__(self, a: Tensor, b: Tensor, in_features: int, out_features: int, rows: Tensor) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.register_buffer("a", a, persistent=False)
        self.register_buffer("b", b, persistent=False)
        self.register_buffer("ranks", torch.zeros(len(a), dtype=torch.int32), persistent=False)
        self.register_buffer("adapters", rows, persistent=False)

    def forward(self, base: Tensor, x: Tensor) -> Tensor:
        """Returns the layer's result ``base`` (…, out_features) with its rows' adapters added."""
        return lora_linear(base, x, self.a, self.b, self.ranks, self.adapters)

    @property
    def slots(self) -> int:
        """Number of adapters that fit."""
        return len(self.ranks)

    def prepare(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Returns an adapter's factors ``(r, in_features)`` and ``(r, out_features)`` as slots hold them."""
        blocks = lora_blocks(b)
        if self.a.dtype == torch.int8:
            return lora_integers(a), lora_integers(blocks)
        return a.to(self.a.dtype), blocks.to(self.b.dtype)

    def write(self, slot: int, a: Tensor, b: Tensor) -> None:
        """Writes an adapter's factors, as `prepare` returns them, to a slot."""
        rank = len(a)
        self.a[slot, :rank], self.b[slot, :, :rank], self.ranks[slot] = a, b, rank

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
    as_integers = sizes.dtype == "int8" or (sizes.dtype == "auto" and model.dtype != torch.float32)
    shapes = [shape for layer in layers for shape in _shapes(layer, sizes, as_integers)]
    factors = iter(_zeros(shapes, torch.int8 if as_integers else model.dtype))
    for layer in layers:
        a, b = next(factors), next(factors)
        layer.lora = LoraSlots(a, b, layer.in_features, layer.out_features, adapters)


def _shapes(
    layer: QuantLinear, sizes: AdapterSlots, as_integers: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shapes of a layer's two factors."""
    inputs, block = layer.in_features, BLOCK
    if as_integers:
        inputs, block = (lora_integers(torch.zeros(n)).shape[0] for n in (inputs, block))
    return (sizes.slots, sizes.rank, inputs), (
        sizes.slots,
        -(-layer.out_features // BLOCK),
        sizes.rank,
        block,
    )


def _zeros(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    """Returns zeros in one piece of memory, on huge pages where the system has them.

    A decode step reads all factors in use; the factor of one layer is often smaller than a huge page.
    """
    sizes = [-(-math.prod(shape) // _LINE) * _LINE for shape in shapes]
    memory = torch.empty(sum(sizes), dtype=dtype)
    prefer_huge(memory)
    memory.zero_()  # written at once, so that it counts as used before the KV cache is sized
    parts = memory.split(sizes)
    return [part[: math.prod(shape)].view(shape) for part, shape in zip(parts, shapes, strict=True)]


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
