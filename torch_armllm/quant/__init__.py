"""Weight quantisation: schemes, packed modules, and the in-place quantiser."""

from __future__ import annotations

from torch_armllm.quant.description import describe, float_bytes, is_packed
from torch_armllm.quant.modules import QuantExperts, QuantLinear
from torch_armllm.quant.quantizer import quantize
from torch_armllm.quant.restoring import restore
from torch_armllm.quant.scheme import Quantised, Scheme
from torch_armllm.quant.schemes import SCHEMES, scheme_named

__all__ = [
    "SCHEMES",
    "QuantExperts",
    "QuantLinear",
    "Quantised",
    "Scheme",
    "describe",
    "float_bytes",
    "is_packed",
    "quantize",
    "restore",
    "scheme_named",
]
