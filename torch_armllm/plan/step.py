"""Inputs of a step, and the protocol of a plan that runs one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from torch_armllm.kv_cache.shapes import Cache


@dataclass
class StepInputs:
    """One step's tokens, packed: the new tokens of B sequences one behind the other, T in all."""

    input_ids: Tensor
    """int64 ``(1, T)``"""
    position_ids: Tensor
    """int64 ``(1, T)``, for rotary embeddings"""
    slots: Tensor
    """int64 ``(T,)``: block · block_size + offset of each token's key and value; negative: not kept"""
    block_table: Tensor
    """int32 ``(B, n)``, contiguous"""
    query_start: Tensor
    """int32 ``(B + 1,)``: first packed token of each sequence"""
    seq_lens: Tensor
    """int32 ``(B,)``: positions of each sequence, this step's tokens included"""
    max_seq_len: int
    cache: Cache
    """keys and values, or latents, of all layers, as the pool's shape makes them"""

    @property
    def caches(self) -> list[Tensor]:
        """The tensors of the cache that there are."""
        return [t for t in self.cache if t is not None]

    @property
    def tokens(self) -> int:
        """T."""
        return self.input_ids.shape[1]


class Plan(Protocol):
    """Something that runs a step."""

    def run(self, inputs: StepInputs) -> Tensor:
        """The last hidden state of every token, ``(T, hidden)``."""
        ...
