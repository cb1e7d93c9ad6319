"""gpt-oss' experts in MXFP4: FP4 values (e2m1) with a power-of-two scale (e8m0) per group of 32.

``…_blocks`` is uint8 (E, rows, groups, 16), two values per byte, the first in the low half; ``…_scales``,
uint8 (E, rows, groups), is the exponent plus 127.  Twice a value is a 5-bit integer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from torch_armllm.checkpoint.formats.integer_weight import IntegerWeight, LazyWeight, stacked
from torch_armllm.checkpoint.formats.part_headers import PartHeaders
from torch_armllm.checkpoint.formats.requantizer import Requantizer
from torch_armllm.checkpoint.formats.tensor_files import open_tensors
from torch_armllm.checkpoint.formats.third_party_checkpoint import ThirdPartyCheckpoint, without_quantization
from torch_armllm.checkpoint.tensor_headers import INTEGERS, TensorHeader
from torch_armllm.quant.schemes.base import Quantized
from torch_armllm.quant.schemes.registry import DEFAULT, scheme_named

EXACT = "int8g32"
_LARGEST = 252
"""The exponent byte with which six, the largest value, is still finite in float32; 255 is NaN."""
_PARTS = ("blocks", "scales")
_TWICE = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)


def decode(blocks: Tensor, scales: Tensor) -> Quantized:
    """Decodes one expert's weight exactly, from (rows, groups, 16) and (rows, groups).

    Raises:
        ValueError: the shapes do not match, or an exponent is NaN.
    """
    if blocks.dim() != 3 or blocks.shape[:2] != scales.shape or blocks.shape[2] != 16:
        raise ValueError(f"blocks of {tuple(blocks.shape)} and scales of {tuple(scales.shape)} do not match")
    if bool((scales > _LARGEST).any()):
        raise ValueError(
            f"a scale is NaN or too large for float32: its exponent byte is {int(scales.max())}, and at most "
            f"{_LARGEST} is expected; the checkpoint is damaged"
        )
    halves = torch.stack((blocks & 15, blocks >> 4), -1).flatten(1)
    half = torch.full_like(scales, 0.5, dtype=torch.float32)
    return Quantized(EXACT, _TWICE[halves.int()], torch.ldexp(half, scales.int() - 127))


def read(source: str, config: PreTrainedConfig, settings: dict[str, Any]) -> ThirdPartyCheckpoint:
    """Opens a checkpoint of gpt-oss: experts are rounded to INT4, or to ``scheme`` of the settings.

    Raises:
        ValueError: a tensor is missing or damaged, or there is no such scheme.
    """
    scheme = scheme_named(str(settings.get("scheme", DEFAULT))).name
    tensors, headers = open_tensors(source)
    requantizer = Requantizer()

    def lazy_weight(name: str) -> LazyWeight:
        blocks, scales = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]

        def expert(block: Tensor, scale: Tensor) -> IntegerWeight:
            quantized = decode(block, scale)
            if scheme == EXACT:
                return IntegerWeight(quantized)
            return requantizer.requantize(scheme_named(EXACT).dequantize(quantized), scheme, "MXFP4")

        def all_experts() -> IntegerWeight:
            try:
                experts = [expert(*parts) for parts in zip(blocks[...], scales[...], strict=True)]
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            weight = stacked(experts)
            return IntegerWeight(weight.quantized, transposed=True)

        return LazyWeight(all_experts)

    names = [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]
    if not names:
        raise ValueError("no tensor is called …_blocks: config.json belongs to another checkpoint")
    stored = {name: one for name, one in headers.items() if not name.endswith(("_blocks", "_scales"))}
    for name in names:
        parts = {part: headers[f"{name}_{part}"] for part in _PARTS if f"{name}_{part}" in headers}
        stored[name] = _declared(name, PartHeaders(name, parts, {}, separator="_"), parts["blocks"].file)
    weights = {name: one for name, one in tensors.items() if not name.endswith(("_blocks", "_scales"))}
    weights.update({name: lazy_weight(name) for name in names})
    return ThirdPartyCheckpoint(
        "mxfp4", source, without_quantization(config), weights, requantizer=requantizer, stored=stored
    )


def _declared(name: str, parts: PartHeaders, file: str) -> TensorHeader:
    """Returns the header of the weight (E, K, N) that a pair of tensors stands for."""
    shape = parts.shape("blocks", "U8")
    if len(shape) != 3 or shape[2] != 16 or parts.experts is None:
        raise ValueError(f"{name}_blocks in {file} has the shape {shape}, and (rows, groups, 16) is expected")
    parts.expect("scales", shape[:2], "U8")
    return TensorHeader(file, INTEGERS, (parts.experts, shape[1] * 32, shape[0]))
