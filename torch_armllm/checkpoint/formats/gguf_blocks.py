"""Decoding of GGUF's weight blocks to integers, scales and offsets that our schemes hold exactly.

A tensor is bytes (rows, blocks · block size), as the ``gguf`` package maps it.  Layouts are those of ggml's
``ggml-common.h``: a block begins with its float16 scales, and the two nibbles of a byte are 16 or 32 values
apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from torch_armllm.quant.schemes.base import Quantized


def _half(blocks: Tensor, start: int) -> Tensor:
    """Returns the float16 at byte ``start`` of every block, as float32 (…, 1)."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(blocks: Tensor) -> Tensor:
    """Returns the low halves of bytes, then the high halves."""
    return torch.cat((blocks & 15, blocks >> 4), -1)


def _fifth_bits(blocks: Tensor) -> Tensor:
    """Unpacks 32 bits from four bytes, the lowest first, each with the value 16."""
    bits = (blocks[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten(-2) << 4


def _quantized(scheme: str, q: Tensor, scales: Tensor, offsets: Tensor | None = None) -> Quantized:
    """Builds a weight from integers (rows, groups, 32), and scales and offsets (rows, groups)."""
    rows = q.shape[0]
    return Quantized(
        scheme,
        q.reshape(rows, -1).contiguous(),
        scales.reshape(rows, -1).contiguous(),
        offsets=None if offsets is None else offsets.reshape(rows, -1).contiguous(),
    )


def _q4_0(blocks: Tensor) -> Quantized:
    return _quantized("g32", _nibbles(blocks[..., 2:]).to(torch.int8) - 8, _half(blocks, 0))


def _q4_1(blocks: Tensor) -> Quantized:
    scale = _half(blocks, 0)
    q = _nibbles(blocks[..., 4:]).to(torch.int8) - 8
    return _quantized("g32m", q, scale, _half(blocks, 2) + 8 * scale)


def _q5_0(blocks: Tensor) -> Quantized:
    q = (_nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])).to(torch.int8) - 16
    return _quantized("int8g32", q, _half(blocks, 0))


def _q5_1(blocks: Tensor) -> Quantized:
    scale = _half(blocks, 0)
    q = (_nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])).to(torch.int8) - 16
    return _quantized("int8g32m", q, scale, _half(blocks, 2) + 16 * scale)


def _q8_0(blocks: Tensor) -> Quantized:
    return _quantized("int8g32", blocks[..., 2:].view(torch.int8), _half(blocks, 0))


def _six_bit_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Unpacks scales and minimums of eight groups of 32 from twelve bytes: uint8 (…, 8) each."""
    low, high, both = blocks[..., 0:4], blocks[..., 4:8], blocks[..., 8:12]
    scales = torch.cat((low & 63, (both & 15) | ((low >> 2) & 48)), -1)
    minimums = torch.cat((high & 63, (both >> 4) | ((high >> 2) & 48)), -1)
    return scales, minimums


def _k_scales(blocks: Tensor, center: int) -> tuple[Tensor, Tensor]:
    """Returns scales and offsets of the groups of a super-block with 6-bit scales."""
    scales, minimums = _six_bit_scales(blocks[..., 4:16])
    step = _half(blocks, 0) * scales.float()
    return step, center * step - _half(blocks, 2) * minimums.float()


def _pairs_of_groups(blocks: Tensor) -> Tensor:
    """Unpacks 128 bytes to 8 groups: 32 bytes hold one group in their low halves, the next in the high."""
    quads = blocks.unflatten(-1, (4, 32))
    return torch.stack((quads & 15, quads >> 4), -2).flatten(-3, -2)


def _q4_k(blocks: Tensor) -> Quantized:
    q = _pairs_of_groups(blocks[..., 16:]).to(torch.int8) - 8
    return _quantized("g32m", q, *_k_scales(blocks, 8))


def _q5_k(blocks: Tensor) -> Quantized:
    high = (blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    q = (_pairs_of_groups(blocks[..., 48:]) | (high << 4)).to(torch.int8) - 16
    return _quantized("int8g32m", q, *_k_scales(blocks, 16))


EXACT: dict[str, tuple[int, Callable[[Tensor], Quantized]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
}
"""Types that a scheme holds exactly: the bytes per block, and the decoder."""
SCHEME_OF = {
    "Q4_0": "g32",
    "Q4_1": "g32m",
    "Q5_0": "int8g32",
    "Q5_1": "int8g32m",
    "Q8_0": "int8g32",
    "Q4_K": "g32m",
    "Q5_K": "int8g32m",
}


def with_zero_offsets(quantized: Quantized) -> Quantized:
    """Returns the same weight in the scheme with offsets, all of them 0."""
    return replace(quantized, scheme=f"{quantized.scheme}m", offsets=torch.zeros_like(quantized.scales))


def decode(kind: str, data: Tensor) -> Quantized:
    """Decodes a tensor of a type of `EXACT` from its bytes (rows, bytes per row)."""
    size, read = EXACT[kind]
    return read(data.unflatten(-1, (-1, size)))
