"""GGUF types that a scheme holds exactly."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from torch_armllm.checkpoint.formats import gguf_blocks as blocks
from torch_armllm.checkpoint.formats.gguf_steps import DECODERS, Decoder
from torch_armllm.quant.schemes.base import Quantized

EXACT: dict[str, tuple[str, Decoder]] = {
    "Q4_0": ("g32", blocks.q4_0),
    "Q4_1": ("g32m", blocks.q4_1),
    "Q5_0": ("int8g32", blocks.q5_0),
    "Q5_1": ("int8g32m", blocks.q5_1),
    "Q8_0": ("int8g32", blocks.q8_0),
    "Q4_K": ("g32m", blocks.q4_k),
    "Q5_K": ("int8g32m", blocks.q5_k),
    **DECODERS,
}
"""The smallest scheme that holds a type exactly, and the decoder, by the type's name."""


def scheme_of(kind: str) -> str | None:
    """Returns the smallest scheme that holds a type exactly; None if no scheme does."""
    return EXACT[kind][0] if kind in EXACT else None


def with_zero_offsets(quantized: Quantized) -> Quantized:
    """Returns the same weight in the scheme with offsets, all of them 0."""
    return replace(quantized, scheme=f"{quantized.scheme}m", offsets=torch.zeros_like(quantized.scales))


def decode(kind: str, data: Tensor) -> Quantized:
    """Decodes a tensor of a type of `EXACT` from its bytes (rows, bytes per row)."""
    import gguf

    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return EXACT[kind][1](data.unflatten(-1, (-1, size)))
