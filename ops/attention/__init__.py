"""Attention of packed tokens from many sequences over a paged KV cache."""

from __future__ import annotations

from torch_armllm.ops.attention.cache_layout import (
    BLOCK_SIZES,
    GROUPS,
    HUGE_PAGE,
    SCALED,
    KvCache,
    check_int4_size,
    keys_by_token,
    kv_cache_shapes,
    new_kv_cache,
    rotated,
    rotation_of,
    value_size_of,
    values_by_token,
)
from torch_armllm.ops.attention.cache_writes import kv_write, reference_kv_write
from torch_armllm.ops.attention.chosen_blocks import block_attention, reference_block_attention
from torch_armllm.ops.attention.paged import paged_attention, reference_paged_attention

__all__ = [
    "BLOCK_SIZES",
    "GROUPS",
    "HUGE_PAGE",
    "SCALED",
    "KvCache",
    "block_attention",
    "check_int4_size",
    "keys_by_token",
    "rotated",
    "rotation_of",
    "kv_cache_shapes",
    "kv_write",
    "new_kv_cache",
    "paged_attention",
    "reference_block_attention",
    "reference_kv_write",
    "reference_paged_attention",
    "value_size_of",
    "values_by_token",
]
