"""Fused operators of namespace ``torch.ops.armllm``: public wrappers, fakes and float32 references."""

from __future__ import annotations

from torch_armllm.ops import library

LIBRARY_PATH = library.load()

from torch_armllm.ops import (  # noqa: E402
    activation,
    attention,
    embedding,
    isa,
    linear,
    mla,
    moe,
    norm,
    rope,
    sample,
    team,
)

__all__ = [
    "LIBRARY_PATH",
    "activation",
    "attention",
    "embedding",
    "isa",
    "linear",
    "mla",
    "moe",
    "norm",
    "rope",
    "sample",
    "team",
]
