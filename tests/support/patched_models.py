"""Patched tiny models, and comparisons with the unpatched model."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import torch_armllm
from tests.support.models import tiny
from torch_armllm.hf.cache_names import cache_argument, cache_of

FAMILIES = ["llama", "mixtral", "qwen3", "qwen3_moe", "olmoe"]
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 6e-2}


def fresh(family: str, dtype: torch.dtype = torch.float32, quantization: str | None = "int4") -> Any:
    """Returns a new patched model."""
    model = tiny(family, dtype)
    torch_armllm.patch(model, quantization, progress=False)
    return model


patched = functools.cache(fresh)
"""Returns a patched model shared by all tests that do not change it."""


def close(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Asserts that logits agree within the dtype's rounding, relative to the largest logit."""
    scale = float(expected.float().abs().max())
    torch.testing.assert_close(got.float(), expected.float(), rtol=0, atol=TOLERANCE[dtype] * scale)


def close_quantized(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Asserts that quantized logits agree: within 1e-5 in float32, and for nine of ten logits in 16 bits.

    In 16 bits, rounding can move an activation to the next integer, or a token to another expert, so a few
    logits may differ by more.  With a wrong expert, nine of ten logits differ by 0.2.
    """
    scale = float(expected.float().abs().max())
    difference = (got.float() - expected.float()).abs().flatten() / scale
    if dtype == torch.float32:
        assert float(difference.max()) < 1e-5
    else:
        assert float(difference.quantile(0.9)) < TOLERANCE[dtype]


@torch.no_grad()
def chunked(model: PreTrainedModel, ids: Tensor, sizes: list[int], cache: Any = None) -> Tensor:
    """Computes the logits of all tokens in chunks, continuing from a cache."""
    name = cache_argument(model.forward)
    parts, begin = [], 0
    for size in sizes:
        out = model(ids[:, begin : begin + size], use_cache=True, **{name: cache})
        cache = cache_of(out)
        parts.append(out.logits)
        begin += size
    return torch.cat(parts, 1)
