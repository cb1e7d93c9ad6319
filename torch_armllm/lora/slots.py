"""Slots for adapters in the layers of a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from torch_armllm.hf.base_model import base_model_of
from torch_armllm.hf.output_layer import output_layer_of
from torch_armllm.lora.block_columns import Columns, columns_of, empty_columns
from torch_armllm.lora.dtypes import LoraDtype
from torch_armllm.lora.expert_slots import ExpertSlots, is_adaptable
from torch_armllm.ops.lora import BLOCK, lora_blocks, lora_embedding, lora_integers, lora_linear
from torch_armllm.quant.modules.linear import QuantLinear
from torch_armllm.quant.modules.tied_embedding import TiedEmbedding
from torch_armllm.quant.recipe import Recipe
from torch_armllm.system.huge_pages import prefer_huge

Embedding: TypeAlias = nn.Embedding | TiedEmbedding
_LINE = 64
"""Elements between the beginnings of factors: whole cache lines."""


_ROWS = 4096
"""Rows of a weight that are compared at a time."""
_ROUNDING, _UNKNOWN_ERROR, _FLOAT_ERROR = 4.0, 0.1, 0.01
"""Largest error of a row by that of the whole weight; what that is if unknown; and that of rounded floats."""


class AdapterSlots(NamedTuple):
    """Sizes of the slots of a model.

    Attributes:
        slots: most adapters at a time.
        rank: highest rank of an adapter.
        rows: most tokens of a step.
        dtype: of the factors.
        ranks: number of tensor parallel ranks that share the model out; experts of several have no slots.
        stages: number of stages that do.
    """

    slots: int
    rank: int
    rows: int
    dtype: LoraDtype = "auto"
    ranks: int = 1
    stages: int = 1

    @property
    def is_sharded(self) -> bool:
        """True if several processes share the model out."""
        return self.ranks * self.stages > 1


class LoraSlots(nn.Module):
    """Adds to each row of a layer's result what the row's adapter says.

    Attributes:
        a: ``(slots, R, in_features)``: the first factor of each adapter; or integers, see `lora_linear`.
        b: ``(slots, ⌈out_features / 64⌉, R, 64)``: the second one, transposed and scaled, in blocks; or
            integers.
        in_features, out_features: sizes of the layer.
        ranks: int32 ``(slots,)``: ranks in use; 0: the slot's adapter leaves the layer alone.
        adapters: int32 ``(L,)``: slot of each row of the step, −1 for none; one tensor for all layers, and
            one for the head, whose rows are those that need logits.
        columns: outputs whose second factors ``b`` holds, those of a rank; None: all.
    """

    kind: ClassVar[Literal["linear", "embedding"]] = "linear"
    columns: Columns | None = None
    a: Tensor
    b: Tensor
    ranks: Tensor
    adapters: Tensor

    def __init__(self, layer: QuantLinear | Embedding, a: Tensor, b: Tensor, rows: Tensor) -> None:
        super().__init__()
        self._layer: tuple[QuantLinear | Embedding, ...] = (layer,)  # in a tuple: it has this module
        self.in_features, self.out_features = _sizes(layer)
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

    def keep(self, columns: Columns, b: Tensor | None = None, weight: Tensor | None = None) -> None:
        """Leaves the second factors of some columns, which a rank computes.

        Args:
            columns: begin and end of each range.
            b: memory for them; None: it is allocated.
            weight: the packed weight of these columns, with which `is_of` then compares.
        """
        self.columns = columns
        self.b = empty_columns(self.b, columns) if b is None else b
        (layer,) = self._layer
        if weight is not None and isinstance(layer, QuantLinear):
            self._layer = (_with_columns(layer, weight, sum(end - begin for begin, end in columns)),)

    def forget_layer(self) -> None:
        """Lets the memory of the layer's whole weight go, with which adapters cannot be compared then."""
        self._layer = ()

    @property
    def can_compare(self) -> bool:
        """True if `is_of` knows the layer's weight."""
        return bool(self._layer)

    def prepare(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Returns an adapter's factors ``(r, in_features)`` and ``(r, out_features)`` as slots hold them."""
        blocks = lora_blocks(b)
        if self.a.dtype == torch.int8:
            return lora_integers(a), lora_integers(blocks)
        return a.to(self.a.dtype), blocks.to(self.b.dtype)

    def write(self, slot: int, a: Tensor, b: Tensor) -> None:
        """Writes an adapter's factors, as `prepare` returns them, to a slot."""
        rank = len(a)
        if self.columns is not None:
            b = columns_of(b, self.columns)
        self.a[slot, :rank], self.b[slot, :, :rank], self.ranks[slot] = a, b, rank

    def clear(self, slot: int) -> None:
        """Empties a slot."""
        self.ranks[slot] = 0

    def is_of(self, weight: Tensor) -> bool:
        """True if a float weight is the layer's own, row by row, but for rounding; of a rank, its rows."""
        (layer,) = self._layer
        own: tuple[int, ...] = (self.out_features, self.in_features)
        rounding = getattr(layer, "error", 0.0)
        bound = _ROUNDING * (_UNKNOWN_ERROR if rounding is None else rounding) + _FLOAT_ERROR
        if not isinstance(layer, QuantLinear):
            own = own[::-1]
        if weight.shape != own:
            return False
        if self.columns is not None:
            weight = torch.cat([weight[begin:end] for begin, end in self.columns])
        parts = (slice(n, min(n + _ROWS, len(weight))) for n in range(0, len(weight), _ROWS))
        return all(_are_close(weight[part], _rows_of(layer, part), bound) for part in parts)


class EmbeddingSlots(LoraSlots):
    """Adds to each embedding what the row's adapter says; see `LoraSlots`.

    Attributes:
        a: ``(slots, in_features, R)``: for each token a row of the first factor, in the model's dtype.
        in_features: number of tokens.
    """

    kind = "embedding"

    def forward(self, base: Tensor, x: Tensor) -> Tensor:
        """Returns embeddings ``base`` (…, out_features) of ids with their rows' adapters added."""
        return lora_embedding(base, x.long(), self.a, self.b, self.ranks, self.adapters)

    def prepare(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """See `LoraSlots.prepare`; what multiplies embeddings within the layer multiplies adapters too."""
        (layer,) = self._layer
        scale = torch.as_tensor(getattr(layer, "embed_scale", 1.0)).to(self.a.dtype).float()
        blocks = lora_blocks(b * scale)
        packed = lora_integers(blocks) if self.b.dtype == torch.int8 else blocks.to(self.b.dtype)
        return a.T.to(self.a.dtype).contiguous(), packed

    def write(self, slot: int, a: Tensor, b: Tensor) -> None:
        """Writes an adapter's factors, as `prepare` returns them, to a slot."""
        rank = a.shape[1]
        self.a[slot, :, :rank], self.b[slot, :, :rank], self.ranks[slot] = a, b, rank


def _sizes(layer: QuantLinear | Embedding) -> tuple[int, int]:
    """Returns the numbers of inputs, or of tokens, and of outputs."""
    if isinstance(layer, QuantLinear):
        return layer.in_features, layer.out_features
    return layer.num_embeddings, layer.embedding_dim


def _with_columns(layer: QuantLinear, weight: Tensor, count: int) -> QuantLinear:
    """Returns a layer with the packed weight of some of its outputs."""
    part = copy(layer)
    part._buffers = {**layer._buffers, "weight_packed": weight}
    part.out_features = count
    return part


def _rows_of(layer: QuantLinear | Embedding, part: slice) -> Tensor:
    """Returns rows of a layer's weight as floats."""
    if isinstance(layer, QuantLinear):
        return layer.dequantize(part)
    if isinstance(layer, nn.Embedding):
        return layer.weight[part].detach()
    return layer.look_up(torch.arange(part.start, part.stop))


def _add_adapters(module: Any, inputs: tuple[Any, ...], out: Tensor) -> Tensor:
    """Adds adapters to the results of an embedding, as a hook."""
    added: Tensor = module.lora(out, inputs[0])
    return added


def _are_close(a: Tensor, b: Tensor, bound: float) -> bool:
    """True if no row of ``a`` differs from that of ``b`` by more than a part of its length."""
    a, b = a.float(), b.float()
    return bool(((a - b).norm(dim=-1) <= bound * b.norm(dim=-1) + 1e-6).all())


def add_slots(model: Any, sizes: AdapterSlots) -> None:
    """Gives the quantized linear layers of a model's base model, and its head, embedding and experts slots.

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
    adapters, of_logits = (torch.full((sizes.rows,), -1, dtype=torch.int32) for _ in range(2))
    head = output_layer_of(model)
    if isinstance(head, QuantLinear):
        layers.append(head)
    as_integers = sizes.dtype == "int8" or (sizes.dtype == "auto" and model.dtype != torch.float32)
    kind = torch.int8 if as_integers else model.dtype
    shapes = [_shapes(layer, sizes, as_integers) for layer in layers]
    if sizes.is_sharded:  # the second factors may get memory of their own
        first, second = (_zeros(each, kind, is_used=False) for each in zip(*shapes, strict=True))
    else:
        both = _zeros([shape for pair in shapes for shape in pair], kind)
        first, second = both[::2], both[1::2]
    for layer, a, b in zip(layers, first, second, strict=True):
        rows = of_logits if layer is head else adapters
        layer.lora = LoraSlots(layer, a, b, rows)
    for experts in filter(is_adaptable, base.modules()) if sizes.ranks == 1 else ():
        experts.lora = ExpertSlots(experts, sizes.slots, sizes.rank, kind, adapters)
    embedding = base.get_input_embeddings()
    if isinstance(embedding, TiedEmbedding) or (
        isinstance(embedding, nn.Embedding) and embedding.max_norm is None
    ):
        _add_embedding_slots(embedding, sizes, model.dtype, kind, adapters)


def _add_embedding_slots(
    embedding: Embedding, sizes: AdapterSlots, dtype: torch.dtype, kind: torch.dtype, rows: Tensor
) -> None:
    tokens, columns = _sizes(embedding)
    (a,) = _zeros([(sizes.slots, tokens, sizes.rank)], dtype, not sizes.is_sharded)
    (b,) = _zeros([_b_shape(columns, sizes, kind == torch.int8)], kind, not sizes.is_sharded)
    if not isinstance(embedding.__dict__["_modules"].get("lora"), EmbeddingSlots):
        embedding.register_forward_hook(_add_adapters)
    embedding.lora = EmbeddingSlots(embedding, a, b, rows)


def _shapes(
    layer: QuantLinear, sizes: AdapterSlots, as_integers: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shapes of a layer's two factors."""
    inputs = _numbers(layer.in_features, as_integers)
    return (sizes.slots, sizes.rank, inputs), _b_shape(layer.out_features, sizes, as_integers)


def _b_shape(outputs: int, sizes: AdapterSlots, as_integers: bool) -> tuple[int, ...]:
    return sizes.slots, -(-outputs // BLOCK), sizes.rank, _numbers(BLOCK, as_integers)


def _numbers(count: int, as_integers: bool) -> int:
    """Returns the elements that hold so many adjacent numbers of a factor."""
    return lora_integers(torch.zeros(count)).shape[0] if as_integers else count


def _zeros(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, is_used: bool = True) -> list[Tensor]:
    """Returns zeros in one piece of memory, on huge pages where the system has them.

    A decode step reads all factors in use; the factor of one layer is often smaller than a huge page.  Memory
    that may not be used is not written yet.
    """
    sizes = [-(-math.prod(shape) // _LINE) * _LINE for shape in shapes]
    memory = torch.empty(sum(sizes), dtype=dtype)
    prefer_huge(memory)
    if is_used:
        memory.zero_()  # written at once, so that it counts as used before the KV cache is sized
    parts = memory.split(sizes)
    return [part[: math.prod(shape)].view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _check_channels(model: Any) -> None:
    config = getattr(model.config, "quantization_config", None)
    if config is not None and config.source is None:  # another tool's integers keep their channels
        check_recipe(config.recipe)


def check_recipe(recipe: Recipe) -> None:
    """Raises ValueError if quantization scales the channels between layers, which adapters do not know."""
    if recipe.method == "rtn" or (recipe.method in ("mse", "gptq") and recipe.importance is False):
        return
    raise ValueError(
        f"enable_lora: quantization by {recipe.method!r} has scaled this model's channels, which adapters do "
        "not know; quantize the float model with Recipe(importance=False), as LLM(float folder, "
        "enable_lora=True) does, or write the folder with method 'rtn'"
    )


Slots: TypeAlias = LoraSlots | ExpertSlots


def slots_of(model: Any) -> dict[str, Slots]:
    """Returns the slots of a model's layers, by the layers' names; none if it has no slots."""
    layers = ((name, getattr(module, "lora", None)) for name, module in model.named_modules())
    return {name: slots for name, slots in layers if isinstance(slots, LoraSlots | ExpertSlots)}


def head_slots(model: Any) -> LoraSlots | None:
    """Returns the slots of a model's head; None if it has none."""
    slots = getattr(output_layer_of(model), "lora", None)
    return slots if isinstance(slots, LoraSlots) else None
