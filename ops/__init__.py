"""Fused operators of namespace ``torch.ops.armllm``: public wrappers, fakes and float32 references."""

from __future__ import annotations

import ctypes
import os

from torch_armllm.ops import loader

LIBRARY_PATH = loader.load()
LIBRARY = ctypes.CDLL(str(LIBRARY_PATH))  # opened once: the file may be replaced while this process runs

from torch_armllm.ops import (  # noqa: E402
    activation,
    attention,
    collective,
    compress,
    embedding,
    linear,
    lora,
    mla,
    moe,
    norm,
    recurrent,
    rope,
    rounding,
    sample,
    select,
    tables,
    threads,
    variants,
)

__all__ = [
    "LIBRARY",
    "LIBRARY_PATH",
    "activation",
    "attention",
    "collective",
    "compress",
    "embedding",
    "linear",
    "lora",
    "mla",
    "moe",
    "norm",
    "recurrent",
    "rope",
    "rounding",
    "sample",
    "select",
    "tables",
    "threads",
    "variants",
]

if os.environ.get(variants.VARIABLE) == variants.TRITON:
    variants.select(variants.TRITON)  # the library knows compiled variants only
