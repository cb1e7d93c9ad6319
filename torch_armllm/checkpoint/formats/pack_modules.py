"""Packing of third-party integer weights into our modules."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from torch_armllm.checkpoint.formats.integer_weight import IntegerWeight
from torch_armllm.hf.expert_layout import parameter
from torch_armllm.ops.linear import interleave_panels
from torch_armllm.quant.layers import Layer, weight_of
from torch_armllm.quant.modules.experts import PackedExperts, QuantExperts
from torch_armllm.quant.modules.linear import Form, Origin, QuantLinear
from torch_armllm.quant.packing import pack
from torch_armllm.quant.parallel import each
from torch_armllm.quant.schemes.base import row_chunks

_CHUNK = 1 << 20
"""Weights that one thread packs at a time."""


def packed_linear(layer: Layer, weight: IntegerWeight) -> QuantLinear:
    """Returns the packed replacement of a linear layer; its round-trip error is not known."""
    module = layer.module
    if weight.transposed and not isinstance(module, Conv1D):
        raise ValueError("the weight is transposed")
    if weight.transposed:  # outputs are the rows of its integers
        weight = IntegerWeight(weight.quantized, weight.permutation)
    rows, columns = weight.shape
    bias = module.bias
    assert bias is None or isinstance(bias, Tensor)
    origin = Origin(module, weight_of(module).dtype, None)
    form = Form(order=None if weight.permutation is None else weight.permutation.int())
    return QuantLinear(_panels(weight), columns, rows, weight.scheme, bias, origin, form)


def packed_experts(layer: Layer, inner: IntegerWeight, outer: IntegerWeight) -> QuantExperts:
    """Returns the packed replacement of experts, from (E, 2·I, H) or ungated (E, I, H), and (E, H, I).

    Raises:
        ValueError: the fused op does not support them.
    """
    module, layout = layer.module, layer.layout
    assert layout is not None
    if inner.scheme != outer.scheme:
        raise ValueError(f"experts store their weights in two schemes: {inner.scheme} and {outer.scheme}")
    if inner.transposed != layout.transposed or outer.transposed != layout.transposed:
        raise ValueError("experts whose groups of columns lie along the outputs cannot be read")
    if inner.permutation is not None or outer.permutation is not None:
        raise ValueError("experts whose inputs have an act-order permutation (desc_act) cannot be read")
    if layout.interleaved and layout.gated:
        parts = [inner.rows(slice(0, None, 2)), inner.rows(slice(1, None, 2))]
    else:
        rows = inner.quantized.q.shape[1]
        size = rows // (2 if layout.gated else 1)
        parts = [inner.rows(slice(start, start + size)) for start in range(0, rows, size)]
    experts, hidden, intermediate = outer.quantized.q.shape
    panels = [_panels(part)[:experts] for part in parts]  # identity experts may have rows of gates and ups
    gate_up = interleave_panels(*panels) if layout.gated else panels[0]
    weights = PackedExperts(gate_up, _panels(outer), layout.biases(module))
    origin = Origin(module, parameter(module, layout.weights[1]).dtype, None)
    return QuantExperts(weights, intermediate, hidden, inner.scheme, layout, origin)


def _panels(weight: IntegerWeight) -> Tensor:
    """Packs the integers of a matrix, or of each expert's, on all cores."""
    if weight.quantized.q.dim() > 2:
        return torch.stack(each(lambda expert: pack(expert.quantized), weight.unbind()))
    rows, columns = weight.quantized.q.shape
    chunks = row_chunks(rows, columns, _CHUNK)
    panels = each(lambda part: pack(weight.rows(part).quantized), chunks)
    return panels[0] if len(panels) == 1 else torch.cat(panels)
