"""Quantized linear ops: INT4 or INT8 weights; activations are quantized to INT8 per token inside the op."""

from __future__ import annotations

from torch_armllm.ops.linear.dense import dense_linear, reference_dense_linear
from torch_armllm.ops.linear.gated import int4_gated_linear, int4_gated_linear_q
from torch_armllm.ops.linear.heads import (
    dense_heads_linear,
    int8_heads_linear,
    reference_dense_heads_linear,
    reference_int8_heads_linear,
)
from torch_armllm.ops.linear.pack import interleave_panels, pack_int4, pack_int8, unpack_weight
from torch_armllm.ops.linear.packed_layout import (
    PanelLayout,
    largest_multiplier,
    panel_count,
    panel_layout,
    scale_sections,
    unpack_int,
)
from torch_armllm.ops.linear.quant_linear import int4_linear, int4_linear_q, int8_linear
from torch_armllm.ops.linear.reference import (
    quantize_activations,
    reference_folded_linear,
    reference_int4_gated_linear,
    reference_int4_linear,
    reference_int8_linear,
    reference_int_linear,
)
from torch_armllm.ops.linear.rms_norm_int8 import reference_rms_norm_int8, rms_norm_int8
from torch_armllm.ops.linear.rotation import rotate_groups
from torch_armllm.ops.linear.schemes import (
    EXACT,
    GROUP,
    PANEL,
    SCHEMES,
    SchemeTraits,
    traits_of,
)

__all__ = [
    "EXACT",
    "GROUP",
    "PANEL",
    "SCHEMES",
    "PanelLayout",
    "SchemeTraits",
    "dense_heads_linear",
    "dense_linear",
    "int4_gated_linear",
    "int4_gated_linear_q",
    "int4_linear",
    "int4_linear_q",
    "int8_heads_linear",
    "int8_linear",
    "interleave_panels",
    "largest_multiplier",
    "pack_int4",
    "pack_int8",
    "panel_count",
    "panel_layout",
    "quantize_activations",
    "reference_dense_heads_linear",
    "reference_dense_linear",
    "reference_folded_linear",
    "reference_int4_gated_linear",
    "reference_int4_linear",
    "reference_int8_heads_linear",
    "reference_int8_linear",
    "reference_int_linear",
    "reference_rms_norm_int8",
    "rms_norm_int8",
    "rotate_groups",
    "scale_sections",
    "traits_of",
    "unpack_int",
    "unpack_weight",
]
