"""How much memory an engine's keys and values get."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from torch_armllm.kv_cache.shapes import CacheShape, LatentShape, Shape
from torch_armllm.system.dtypes import dtype_name
from torch_armllm.system.files import format_bytes
from torch_armllm.system.host import free_memory

DEFAULT_SHARE = 0.25
"""Of the free memory, at most: weights are loaded by then, but others live on the machine too."""


@dataclass(frozen=True)
class KvMemory:
    """The memory of an engine's keys and values.

    Attributes:
        num_blocks: of the cache.
        swap_blocks: of swap memory.
        block_size: positions a block.
        block_bytes: bytes of all layers' keys and values of one block.
        max_model_len: tokens of the longest text that fits and is allowed.
        dtype: what they are stored as.
    """

    num_blocks: int
    swap_blocks: int
    block_size: int
    block_bytes: int
    max_model_len: int
    dtype: str

    @property
    def tokens(self) -> int:
        """Positions that fit."""
        return self.num_blocks * self.block_size

    def __str__(self) -> str:
        swap = (
            f", and {format_bytes(self.swap_blocks * self.block_bytes)} of swap" if self.swap_blocks else ""
        )
        return (
            f"KV cache {format_bytes(self.num_blocks * self.block_bytes)} for {self.tokens} tokens "
            f"({self.dtype}, {self.block_bytes // self.block_size} bytes a token){swap}: "
            f"{self.tokens / self.max_model_len:.1f} texts of max_model_len = {self.max_model_len}"
        )


def size_kv_memory(
    shape: Shape,
    max_length: int,
    *,
    max_model_len: int | None = None,
    max_num_seqs: int = 64,
    memory: int | float | None = None,
    swap_space: int = 0,
    free: int | None = None,
) -> KvMemory:
    """Decides on the number of blocks.

    Args:
        shape: what a position takes.
        max_length: most tokens of a sequence that the model allows.
        max_model_len: most tokens of a text that were asked for; None: as many as fit, up to ``max_length``.
        max_num_seqs: texts that are worked on at once; more memory than they can fill is not taken by itself.
        memory: bytes, a share of the free memory (a float up to 1), or None: `DEFAULT_SHARE` of it at most.
        swap_space: bytes for blocks of texts that wait.
        free: bytes that the process may take; measured by default.

    Raises:
        ValueError: a text of ``max_model_len`` does not fit, or more is asked for than is free.
    """
    free = free_memory() if free is None else free
    wanted = max_length if max_model_len is None else max_model_len
    block_bytes = shape.block_size * shape.bytes_per_token
    granted, origin = _granted(memory, free)
    if granted + swap_space > free:
        raise ValueError(
            f"kv_cache_memory = {format_bytes(granted)} and swap_space = {format_bytes(swap_space)} are more "
            f"than the {format_bytes(free)} that are free: ask for less, or for a share such as "
            "kv_cache_memory=0.5"
        )
    blocks = granted // block_bytes
    a_text = -(-wanted // shape.block_size)
    if blocks < a_text:
        fitting = blocks * shape.block_size
        if max_model_len is not None or fitting == 0:
            raise ValueError(
                f"one text of max_model_len = {wanted} tokens needs {format_bytes(a_text * block_bytes)} of "
                f"keys and values ({shape.bytes_per_token} bytes a token), but they get "
                f"{format_bytes(granted)}, {origin}: {_remedies(shape, fitting)}"
            )
        wanted = fitting
    if memory is None:
        blocks = min(blocks, max_num_seqs * a_text)
    dtype = dtype_name(shape.dtype)
    return KvMemory(blocks, swap_space // block_bytes, shape.block_size, block_bytes, wanted, dtype)


def shape_by_config(config: Any, dtype: torch.dtype) -> CacheShape | None:
    """What a cache of transformers' own takes at most; None where a text's state does not grow with it.

    Args:
        config: of a model without a plan.
        dtype: of its keys and values.
    """
    text = config.get_text_config()

    def size_of(name: str) -> int:
        found = getattr(text, name, None)
        return found if isinstance(found, int) else 0

    layers, heads = size_of("num_hidden_layers"), size_of("num_attention_heads")
    if not (layers and heads and size_of("hidden_size")):
        return None
    size = size_of("head_dim") or size_of("hidden_size") // heads
    return CacheShape(layers, size_of("num_key_value_heads") or heads, size, size, dtype)


def _remedies(shape: Shape, fitting: int) -> str:
    found = ["raise kv_cache_memory"]
    if fitting:
        found.append(f"set max_model_len to {fitting} or less")
    if not isinstance(shape, LatentShape) and shape.dtype != torch.int8:
        found.append('store them as int8 (kv_cache_dtype="int8")')
    return ", or ".join(found)


def _granted(memory: int | float | None, free: int) -> tuple[int, str]:
    """Bytes for keys and values, and where the number comes from."""
    if memory is None:
        return int(DEFAULT_SHARE * free), f"a quarter of the {format_bytes(free)} that are free"
    if isinstance(memory, float) and 0 < memory <= 1:
        return int(memory * free), f"{memory:.0%} of the {format_bytes(free)} that are free"
    if memory <= 1:
        raise ValueError(f"kv_cache_memory is bytes, or a share 0.0 … 1.0 of the free memory, not {memory}")
    return int(memory), "as kv_cache_memory says"
