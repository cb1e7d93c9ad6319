"""Dtypes of a KV cache, and of the states of recurrent layers."""

from __future__ import annotations

import torch

from torch_armllm.system.dtypes import full_dtype_name

KV_CACHE_DTYPES = {
    "int4": torch.uint8,  # two elements in a byte
    "int8": torch.int8,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}

STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def kv_cache_dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a KV cache's element type."""
    return next(name for name, each in KV_CACHE_DTYPES.items() if each == dtype)


def full_kv_cache_dtype(name: str | None) -> str | None:
    """Returns the full name of a KV cache dtype, such as ``bfloat16`` for ``bf16``; None: the model's own.

    Raises:
        ValueError: there is no such dtype.
    """
    full = full_dtype_name(name) if isinstance(name, str) else name
    if full is not None and not (isinstance(full, str) and full in KV_CACHE_DTYPES):
        raise ValueError(f"kv_cache_dtype must be one of {', '.join(KV_CACHE_DTYPES)} or None, not {name!r}")
    return full
