"""Packed modules from integers that another tool found."""

from __future__ import annotations

from torch import Tensor

from torch_armllm.ops.linear import interleave_panels
from torch_armllm.quant.experts import parameter
from torch_armllm.quant.formats.weights import Integers
from torch_armllm.quant.layers import Layer, weight_of
from torch_armllm.quant.modules import QuantExperts, QuantLinear
from torch_armllm.quant.packing import pack


def packed_linear(layer: Layer, weight: Integers) -> QuantLinear:
    """What takes the place of a linear layer; its round-trip error is not known."""
    module = layer.module
    if weight.flipped:
        raise ValueError("the weight is transposed")
    rows, columns = weight.shape
    bias = module.bias
    assert bias is None or isinstance(bias, Tensor)
    return QuantLinear(
        pack(weight.quantised),
        columns,
        rows,
        weight.scheme,
        bias,
        None,
        module,
        weight_of(module).dtype,
        None if weight.order is None else weight.order.int(),
    )


def packed_experts(layer: Layer, inner: Integers, outer: Integers) -> QuantExperts:
    """What takes the place of experts, from (E, 2·I, H), or (E, I, H) without a gate, and (E, H, I).

    Raises:
        ValueError: the fused op cannot compute them.
    """
    module, layout = layer.module, layer.layout
    assert layout is not None
    if inner.scheme != outer.scheme:
        raise ValueError(f"experts store their weights in two ways: {inner.scheme} and {outer.scheme}")
    if inner.scheme == "int8":
        raise ValueError("experts of 8 bits have no fused op; those of 4 bits do")
    if inner.order is not None or outer.order is not None:
        raise ValueError("experts whose inputs are ordered by activation (desc_act) cannot be read")
    if layout.interleaved and layout.gated:
        parts = [inner.rows(slice(0, None, 2)), inner.rows(slice(1, None, 2))]
    else:
        rows = inner.quantised.q.shape[1]
        size = rows // (2 if layout.gated else 1)
        parts = [inner.rows(slice(start, start + size)) for start in range(0, rows, size)]
    panels = [pack(part.quantised) for part in parts]
    hidden, intermediate = outer.quantised.q.shape[1:]
    return QuantExperts(
        interleave_panels(*panels) if layout.gated else panels[0],
        pack(outer.quantised),
        intermediate,
        hidden,
        inner.scheme,
        layout.activation,
        layout.limit,
        *layout.biases(module),
        error=None,
        shell=module,
        float_dtype=parameter(module, layout.weights[1]).dtype,
        layout=layout,
    )
