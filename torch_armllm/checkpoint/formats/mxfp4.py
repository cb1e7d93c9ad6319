"""gpt-oss' experts in MXFP4: FP4 values (e2m1) with a power of two (e8m0) for every 32 of them.

``…_blocks`` is uint8 (E, rows, groups, 16), two values a byte, the first in its low half; ``…_scales``, uint8
(E, rows, groups), is the exponent plus 127.  Twice a value is an integer of five bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from torch_armllm.checkpoint.formats.base import Foreign, without_quantization
from torch_armllm.checkpoint.formats.integer_weight import Integers, Lazy, stacked
from torch_armllm.checkpoint.formats.requantized import Rounded
from torch_armllm.checkpoint.formats.tensor_files import open_tensors
from torch_armllm.quant.schemes.base import Quantized
from torch_armllm.quant.schemes.registry import scheme_named

EXACT = "int8g32"
_TWICE = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)


def decode(blocks: Tensor, scales: Tensor) -> Quantized:
    """One expert's weight, from (rows, groups, 16) and (rows, groups), exactly.

    Raises:
        ValueError: the shapes do not fit one another, or an exponent says NaN.
    """
    if blocks.dim() != 3 or blocks.shape[:2] != scales.shape or blocks.shape[2] != 16:
        raise ValueError(f"blocks of {tuple(blocks.shape)} and scales of {tuple(scales.shape)} do not fit")
    if bool((scales == 255).any()):
        raise ValueError("a scale is NaN: the checkpoint is damaged")
    halves = torch.stack((blocks & 15, blocks >> 4), -1).flatten(1)
    half = torch.full_like(scales, 0.5, dtype=torch.float32)
    return Quantized(EXACT, _TWICE[halves.int()], torch.ldexp(half, scales.int() - 127))


def read(place: str, config: PreTrainedConfig, settings: dict[str, Any]) -> Foreign:
    """Opens a folder of gpt-oss: experts are rounded to g32i, or what ``scheme`` in the settings names.

    Raises:
        ValueError: a tensor is missing or damaged, or there is no such scheme.
    """
    scheme = scheme_named(str(settings.get("scheme", "g32i"))).name
    tensors = open_tensors(place)
    rounded = Rounded()

    def lazily(name: str) -> Lazy:
        blocks, scales = tensors[f"{name}_blocks"], tensors.get(f"{name}_scales")
        if scales is None:
            raise ValueError(f"{name}_scales is missing: a file is, or it is damaged")

        def expert(block: Tensor, scale: Tensor) -> Integers:
            found = decode(block, scale)
            if scheme == EXACT:
                return Integers(found)
            return rounded.round(scheme_named(EXACT).dequantize(found), scheme, "MXFP4")

        def whole() -> Integers:
            try:
                experts = [expert(*parts) for parts in zip(blocks[...], scales[...], strict=True)]
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            weight = stacked(experts)
            return Integers(weight.quantized, flipped=True)

        return Lazy(whole)

    names = [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]
    weights = {name: one for name, one in tensors.items() if not name.endswith(("_blocks", "_scales"))}
    weights.update({name: lazily(name) for name in names})
    return Foreign("mxfp4", place, without_quantization(config), weights, rounded=rounded)
