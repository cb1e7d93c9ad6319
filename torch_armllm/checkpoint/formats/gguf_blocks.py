"""Decoding of GGUF's weight blocks to integers, scales and offsets that our schemes hold exactly.

A tensor is bytes (rows, blocks · block size), as the ``gguf`` package maps it.  Layouts are those of ggml's
``ggml-common.h``: a block begins with its float16 scales, and the two nibbles of a byte are 16 or 32 values
apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_armllm.quant.schemes.base import Quantized


def half(blocks: Tensor, start: int) -> Tensor:
    """Returns the float16 at byte ``start`` of every block, as float32 (…, 1)."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(blocks: Tensor) -> Tensor:
    """Returns the low halves of bytes, then the high halves."""
    return torch.cat((blocks & 15, blocks >> 4), -1)


def _fifth_bits(blocks: Tensor) -> Tensor:
    """Unpacks 32 bits from four bytes, the lowest first, each with the value 16."""
    bits = (blocks[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten(-2) << 4


def quantized(scheme: str, q: Tensor, scales: Tensor, offsets: Tensor | None = None) -> Quantized:
    """Builds a weight from integers (rows, groups, 32), and scales and offsets (rows, groups)."""
    rows = q.shape[0]
    return Quantized(
        scheme,
        q.reshape(rows, -1).contiguous(),
        scales.reshape(rows, -1).contiguous(),
        offsets=None if offsets is None else offsets.reshape(rows, -1).contiguous(),
    )


def q4_0(blocks: Tensor) -> Quantized:
    """Decodes to ``g32``."""
    return quantized("g32", _nibbles(blocks[..., 2:]).to(torch.int8) - 8, half(blocks, 0))


def q4_1(blocks: Tensor) -> Quantized:
    """Decodes to ``g32m``."""
    scale = half(blocks, 0)
    q = _nibbles(blocks[..., 4:]).to(torch.int8) - 8
    return quantized("g32m", q, scale, half(blocks, 2) + 8 * scale)


def q5_0(blocks: Tensor) -> Quantized:
    """Decodes to ``int8g32``."""
    q = (_nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])).to(torch.int8) - 16
    return quantized("int8g32", q, half(blocks, 0))


def q5_1(blocks: Tensor) -> Quantized:
    """Decodes to ``int8g32m``."""
    scale = half(blocks, 0)
    q = (_nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])).to(torch.int8) - 16
    return quantized("int8g32m", q, scale, half(blocks, 2) + 16 * scale)


def q8_0(blocks: Tensor) -> Quantized:
    """Decodes to ``int8g32``."""
    return quantized("int8g32", blocks[..., 2:].view(torch.int8), half(blocks, 0))


def _six_bit_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Unpacks scales and minimums of eight groups of 32 from twelve bytes: uint8 (…, 8) each."""
    low, high, both = blocks[..., 0:4], blocks[..., 4:8], blocks[..., 8:12]
    scales = torch.cat((low & 63, (both & 15) | ((low >> 2) & 48)), -1)
    minimums = torch.cat((high & 63, (both >> 4) | ((high >> 2) & 48)), -1)
    return scales, minimums


def _k_scales(blocks: Tensor, center: int) -> tuple[Tensor, Tensor]:
    """Returns scales and offsets of the groups of a super-block with 6-bit scales."""
    scales, minimums = _six_bit_scales(blocks[..., 4:16])
    step = half(blocks, 0) * scales.float()
    return step, center * step - half(blocks, 2) * minimums.float()


def _pairs_of_groups(blocks: Tensor) -> Tensor:
    """Unpacks 128 bytes to 8 groups: 32 bytes hold one group in their low halves, the next in the high."""
    quads = blocks.unflatten(-1, (4, 32))
    return torch.stack((quads & 15, quads >> 4), -2).flatten(-3, -2)


def q4_k(blocks: Tensor) -> Quantized:
    """Decodes to ``g32m``."""
    q = _pairs_of_groups(blocks[..., 16:]).to(torch.int8) - 8
    return quantized("g32m", q, *_k_scales(blocks, 8))


def q5_k(blocks: Tensor) -> Quantized:
    """Decodes to ``int8g32m``."""
    high = (blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    q = (_pairs_of_groups(blocks[..., 48:]) | (high << 4)).to(torch.int8) - 16
    return quantized("int8g32m", q, *_k_scales(blocks, 16))
