"""GGUF types that a scheme holds exactly.

For types whose values are small integers times a step (the ternary, grid and table types), the ``gguf``
package decodes the values; its tables are not repeated here.  The integers are the values divided by the step
of their group of 32.  Values and steps are exact in float32, so the quotients are whole numbers but for
float32's rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from torch_armllm.checkpoint.formats import gguf_blocks
from torch_armllm.checkpoint.formats.gguf_blocks import half, quantized
from torch_armllm.quant.schemes.base import Quantized

Decoder = Callable[[Tensor], Quantized]


def _nibbles(data: Tensor) -> Tensor:
    """Returns the low and the high half of each byte, one after the other."""
    return torch.stack((data & 15, data >> 4), -1).flatten(-2)


def _words(data: Tensor) -> Tensor:
    """Reads little-endian words of 16 bits."""
    return data.contiguous().view(torch.uint16).int()


def _of_block(start: int) -> Callable[[Tensor], Tensor]:
    """Returns a reader of types with one step for 256 values, a float16 at byte ``start``."""
    return lambda blocks: half(blocks, start).expand(*blocks.shape[:-1], 8)


def _iq4_xs(blocks: Tensor) -> Tensor:
    high = (_words(blocks[..., 2:4]) >> torch.arange(0, 16, 2, dtype=torch.int32)) & 3
    return half(blocks, 0) * ((_nibbles(blocks[..., 4:8]).int() | (high << 4)) - 32).float()


def _mxfp4(blocks: Tensor) -> Tensor:
    exponents = blocks[..., 0:1].int() - 128
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)


def _iq2_xxs(blocks: Tensor) -> Tensor:
    scales = blocks[..., 2:].unflatten(-1, (8, 8))[..., 7] >> 4
    steps: Tensor = half(blocks, 0) * (0.5 + scales.float()) * 0.25
    return steps


def _iq3_xxs(blocks: Tensor) -> Tensor:
    scales = blocks[..., 66:].unflatten(-1, (8, 4))[..., 3] >> 4
    steps: Tensor = half(blocks, 0) * (0.5 + scales.float()) * 0.5
    return steps


def _iq3_s(blocks: Tensor) -> Tensor:
    return half(blocks, 0) * (1 + 2 * _nibbles(blocks[..., 106:110]).float())


def _integers(kind: str, blocks: Tensor, steps: Tensor, offsets: Tensor | None = None) -> Tensor:
    """Returns the integers of blocks (rows, blocks, bytes): floats (rows, groups, 32)."""
    import gguf

    values = gguf.dequantize(blocks.flatten(-2).numpy(), gguf.GGMLQuantizationType[kind])
    groups = torch.from_numpy(np.require(values, np.float32, ("C", "W"))).unflatten(-1, (-1, 32))
    rows = len(blocks)
    if offsets is not None:
        groups = groups - offsets.reshape(rows, -1, 1)
    divisors = steps.reshape(rows, -1, 1)
    return torch.where(divisors == 0, 0.0, groups / divisors).round_().clamp_(-128, 127)


def _decoder(kind: str, scheme: str, steps_of: Callable[[Tensor], Tensor]) -> Decoder:
    def read(blocks: Tensor) -> Quantized:
        steps = steps_of(blocks)
        return quantized(scheme, _integers(kind, blocks, steps).to(torch.int8), steps)

    return read


def _iq1_s(blocks: Tensor) -> Quantized:
    """Decodes −1, 0 and 1 with an offset of an eighth of the step, up or down."""
    high = _words(blocks[..., 34:50])
    steps = half(blocks, 0) * (2 * ((high >> 12) & 7) + 1).float()
    offsets = torch.where(high & 0x8000 == 0, 0.125, -0.125) * steps
    return quantized("g32m", _integers("IQ1_S", blocks, steps, offsets).to(torch.int8), steps, offsets)


EXACT: dict[str, tuple[str, Decoder]] = {
    "Q4_0": ("g32", gguf_blocks.q4_0),
    "Q4_1": ("g32m", gguf_blocks.q4_1),
    "Q5_0": ("int8g32", gguf_blocks.q5_0),
    "Q5_1": ("int8g32m", gguf_blocks.q5_1),
    "Q8_0": ("int8g32", gguf_blocks.q8_0),
    "Q4_K": ("g32m", gguf_blocks.q4_k),
    "Q5_K": ("int8g32m", gguf_blocks.q5_k),
    "TQ1_0": ("g32", _decoder("TQ1_0", "g32", _of_block(52))),
    "TQ2_0": ("g32", _decoder("TQ2_0", "g32", _of_block(64))),
    "IQ1_S": ("g32m", _iq1_s),
    "IQ2_XXS": ("int8g32", _decoder("IQ2_XXS", "int8g32", _iq2_xxs)),
    "IQ3_XXS": ("int8g32", _decoder("IQ3_XXS", "int8g32", _iq3_xxs)),
    "IQ3_S": ("int8g32", _decoder("IQ3_S", "int8g32", _iq3_s)),
    "IQ4_NL": ("int8g32", _decoder("IQ4_NL", "int8g32", lambda blocks: half(blocks, 0))),
    "IQ4_XS": ("int8g32", _decoder("IQ4_XS", "int8g32", _iq4_xs)),
    "MXFP4": ("int8g32", _decoder("MXFP4", "int8g32", _mxfp4)),
    # two steps in a group of 32, −32…31 times one of their block: their products with −4…3 fit in a byte
    "Q3_K": ("int8g32", _decoder("Q3_K", "int8g32", lambda blocks: -_of_block(108)(blocks))),
}
"""The smallest scheme that holds a type exactly, and the decoder, by the type's name."""


def scheme_of(kind: str) -> str | None:
    """Returns the smallest scheme that holds a type exactly; None if no scheme does."""
    return EXACT[kind][0] if kind in EXACT else None


def with_zero_offsets(weight: Quantized) -> Quantized:
    """Returns the same weight in the scheme with offsets, all of them 0."""
    return replace(weight, scheme=f"{weight.scheme}m", offsets=torch.zeros_like(weight.scales))


def decode(kind: str, data: Tensor) -> Quantized:
    """Decodes a tensor of a type of `EXACT` from its bytes (rows, bytes per row)."""
    import gguf

    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return EXACT[kind][1](data.unflatten(-1, (-1, size)))
