"""Packs one layer into the module that replaces it; the model stays as it is."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from torch_armllm.hf.expert_layout import parameter
from torch_armllm.ops.embedding import split_rest
from torch_armllm.ops.linear import interleave_panels
from torch_armllm.quant.layers import Layer, block_count, weight_of
from torch_armllm.quant.methods.base import Method
from torch_armllm.quant.modules.experts import PackedExperts, QuantExperts
from torch_armllm.quant.modules.linear import Form, Origin, QuantLinear
from torch_armllm.quant.modules.tied_embedding import TiedEmbedding, can_share
from torch_armllm.quant.packing import empty_panels, quantize_matrices, quantize_pieces
from torch_armllm.quant.report import LayerRecord
from torch_armllm.quant.schemes.base import Scheme
from torch_armllm.quant.spill_file import SpillFile


@dataclass(frozen=True)
class Replacement:
    """A packed layer that waits for its place in the model.

    Attributes:
        module: the module of packed weights.
        op: the op that it calls.
        sharer: replaces an embedding that is tied to the layer, and shares the packed weights.
        keep: True if the layer keeps its float weights.
        spill: holds the buffers of both modules; None: the modules do.
    """

    module: QuantLinear | QuantExperts
    op: str
    sharer: TiedEmbedding | None = None
    keep: bool = False
    spill: SpillFile | None = None

    def record(self, layer: Layer) -> LayerRecord:
        """Returns the report's record; to be called while the layer still has its float weights."""
        weights = layer.weights()
        count, before = sum(w.numel() for w in weights), sum(w.nbytes for w in weights)
        new = self.module
        after = sum(buffer.nbytes for buffer in new.buffers())
        return LayerRecord(layer.name, layer.kind, self.op, new.scheme, count, before, after, new.error)


def make_replacement(
    model: nn.Module, layer: Layer, scheme: Scheme, method: Method, keep: bool, spill: SpillFile
) -> Replacement:
    """Packs a layer into the module that will replace it.

    Args:
        model: the model, to find embeddings that are tied to the layer.
        layer: the layer.
        scheme: its scheme.
        method: chooses the integers.
        keep: keep the float weights.
        spill: receives the packed weights.

    Raises:
        ValueError: a weight is not finite.
    """
    own = {id(weight) for weight in layer.weights()}
    tied = [m for m in model.modules() if isinstance(m, nn.Embedding) and id(m.weight) in own]
    share = bool(tied) and not keep and layer.kind != "experts" and can_share(tied[0], scheme.name)
    new: QuantLinear | QuantExperts
    sharer = None
    try:
        if layer.kind == "experts":
            new, op = _quantize_experts(layer, scheme, method), "int4_moe"
            spill.store(new)
        else:
            new, sharer = _quantize_linear(layer, scheme, method, tied[0] if share else None, spill)
            op = new.op
    except ValueError as error:
        raise ValueError(f"{layer.name}: {error}") from error
    new.train(layer.module.training)
    return Replacement(new, op, sharer, keep or (bool(tied) and not share), spill)


def _quantize_linear(
    layer: Layer, scheme: Scheme, method: Method, tied: nn.Embedding | None, spill: SpillFile
) -> tuple[QuantLinear, TiedEmbedding | None]:
    """Packs a linear layer, and for an embedding that is ``tied`` to it the remaining bits."""
    module = layer.module
    weight = weight_of(module).detach()
    weight = weight.t() if isinstance(module, Conv1D) else weight
    bias = module.bias
    assert bias is None or isinstance(bias, Tensor)
    rows, columns = weight.shape
    empty = empty_panels((), rows, columns, scheme.name)
    blocks = block_count(module) if layer.kind == "blocks" else 1
    rotated = method.rotates(layer, scheme)
    new = QuantLinear(
        weight_packed=empty,
        in_features=columns,
        out_features=rows,
        scheme=scheme.name,
        bias=bias,
        origin=Origin(module, weight.dtype),
        form=Form(blocks=blocks, rotated=rotated),
    )
    sharer = None if tied is None else TiedEmbedding(tied, new)

    def take(piece: Tensor, panels: Tensor) -> None:
        spill.append(new, "weight_packed", panels)
        if sharer is not None:
            spill.append(sharer, "rest", split_rest(piece, panels, sharer.scheme))

    new.error = quantize_pieces(weight, scheme, method.rounding(layer, scheme), take, rotated)
    return new, sharer


def _quantize_experts(layer: Layer, scheme: Scheme, method: Method) -> QuantExperts:
    module, layout = layer.module, layer.layout
    assert layout is not None
    inner, outer = (parameter(module, name) for name in layout.weights)
    downs = layout.outer(outer)
    experts = range(len(downs))
    inner_roundings, outer_roundings = (
        [method.rounding(layer, scheme, name, expert) for expert in experts] for name in layout.weights
    )
    rotated = method.rotates(layer, scheme)
    inner_packed = [quantize_matrices(part, scheme, inner_roundings, rotated) for part in layout.inner(inner)]
    down, down_error = quantize_matrices(downs, scheme, outer_roundings, rotated)
    hidden, intermediate = downs[0].shape
    errors = [*(error for _, error in inner_packed), down_error]
    first, *rest = (panels for panels, _ in inner_packed)
    gate_up = interleave_panels(first, *rest) if layout.gated else first
    # The matrices have the same number of weights and nearly the same norm.
    error = (sum(error**2 for error in errors) / len(errors)) ** 0.5
    weights = PackedExperts(gate_up, down, layout.biases(module))
    origin = Origin(module, outer.dtype, error)
    return QuantExperts(weights, intermediate, hidden, scheme.name, layout, origin, rotated)
