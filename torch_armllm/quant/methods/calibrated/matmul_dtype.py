"""The type in which large matrix products are quickest."""

from __future__ import annotations

import functools

import torch

from torch_armllm.ops import variants


@functools.cache
def fast_matmul_dtype() -> torch.dtype:
    """bfloat16 where the CPU multiplies it, at twice float32's rate; float32 elsewhere."""
    multiplies = any("bf16" in feature for feature in variants.machine().features)
    return torch.bfloat16 if multiplies else torch.float32
