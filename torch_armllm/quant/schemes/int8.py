"""Schemes with INT8 values."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_armllm.ops.linear import GROUP
from torch_armllm.quant.schemes.base import Quantized, Scheme
from torch_armllm.quant.schemes.float_scales import Offset
from torch_armllm.quant.schemes.scale_search import regroup


class Int8(Scheme):
    """One float scale per row, q in −127…127: for the output head, or for all layers."""

    lowest, highest = -127, 127

    def quantize_rows(  # noqa: D102
        self, weight: Tensor, importance: Tensor | None = None, search: bool = True
    ) -> Quantized:
        flat = weight.flatten(1)
        scale = flat.abs().amax(dim=1) / 127
        scale = torch.where(scale > 1e-30, scale, torch.ones_like(scale))
        q = torch.round(flat / scale[:, None]).clamp_(-127, 127)
        return Quantized(self.name, q.to(torch.int8), scale)


class Int8Groups(Scheme):
    """A float scale for every ``span`` columns, q in −127…127: GGUF's Q8_0."""

    lowest, highest = -127, 127

    def quantize_rows(  # noqa: D102
        self, weight: Tensor, importance: Tensor | None = None, search: bool = True
    ) -> Quantized:
        value, _ = regroup(weight, None, self.span)
        scale = value.abs().amax(dim=2) / 127
        scale = torch.where(scale > 1e-30, scale, torch.ones_like(scale))
        q = torch.round(value / scale[..., None]).clamp_(-127, 127)
        return Quantized(self.name, q.flatten(1)[:, : weight.shape[1] * GROUP].to(torch.int8), scale)


class Int8Offset(Offset):
    """``w = s · q + c`` with q in −128…127: GGUF's Q5_1 and Q5_K."""

    shrink = (1.0,)
