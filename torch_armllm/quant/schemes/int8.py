"""Schemes with INT8 values."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_armllm.ops.linear import GROUP
from torch_armllm.quant.schemes.base import Quantized, Scheme
from torch_armllm.quant.schemes.float_scales import Offset
from torch_armllm.quant.schemes.scale_search import regroup


class Int8(Scheme):
    """A float scale for every ``span`` columns (0: for a whole row), q in −127…127.

    By rows, it is for the output head, or for all layers; by groups of 32, it is GGUF's Q8_0.
    """

    lowest, highest = -127, 127

    def quantize_rows(  # noqa: D102
        self, weight: Tensor, importance: Tensor | None = None, search: bool = True
    ) -> Quantized:
        value, _ = regroup(weight, None, self.span)
        scale = value.abs().amax(dim=2) / 127
        scale = torch.where(scale > 1e-30, scale, torch.ones_like(scale))
        q = torch.round(value / scale[..., None]).clamp_(-127, 127)
        q = q.flatten(1)[:, : weight.shape[1] * GROUP].to(torch.int8)
        return Quantized(self.name, q, scale if self.span else scale[:, 0])


class Int8Offset(Offset):
    """``w = s · q + c`` with q in −128…127: GGUF's Q5_1 and Q5_K."""

    shrink = (1.0,)
