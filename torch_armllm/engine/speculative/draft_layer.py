"""Draft layers: decoder layers that draft tokens from the hidden states of the model that they serve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_armllm.kv_cache.shapes import Shape
from torch_armllm.plan.fused_head import FusedHead
from torch_armllm.plan.native import native_plan
from torch_armllm.plan.servable_model import Head
from torch_armllm.plan.step import Plan


class DraftHead:
    """From hidden states of a draft layer to logits of the model's tokens.

    Args:
        head: hidden states to logits of the head's own tokens.
        vocab_size: number of the model's tokens.
        token_ids: int64, the model's id of each of the head's tokens; None: they are the same.
    """

    def __init__(self, head: Head, vocab_size: int, token_ids: Tensor | None = None) -> None:
        self._head, self._vocab_size, self._token_ids = head, vocab_size, token_ids
        self._ids = None if token_ids is None else token_ids.tolist()

    @torch.no_grad()
    def __call__(self, hidden: Tensor) -> Tensor:
        """Returns the logits of rows ``(R, hidden)``."""
        return self.spread(self._head(hidden))

    def spread(self, logits: Tensor) -> Tensor:
        """Returns logits of the model's tokens from those of the head's; the other tokens have none."""
        if self._token_ids is None:
            return logits
        spread = logits.new_full((len(logits), self._vocab_size), float("-inf"))
        spread[:, self._token_ids] = logits
        return spread

    def tokens(self, best: list[int]) -> list[int]:
        """Returns the model's ids of tokens of the head."""
        return best if self._ids is None else [self._ids[token] for token in best]

    def fuse(self, layer: DraftLayer, hidden: Tensor, drawable: int) -> FusedHead | None:
        """Returns the head fused with its layer's plan; None if one of them is none that can be.

        Args:
            layer: that the head belongs to.
            hidden: rows that the head reads; their values do not matter.
            drawable: number of the model's tokens that may be drafted.
        """
        if (plan := native_plan(layer.plan)) is None or layer.head_columns.start:
            return None
        if self._ids is not None:
            if self._ids != sorted(self._ids):
                return None
            drawable = sum(token < drawable for token in self._ids)
        weights = self._head.weights(hidden)
        if weights is None or not drawable:
            return None
        return FusedHead(plan, weights, drawable, len(layer.head_columns), layer.next_columns)


@dataclass
class DraftLayer:
    """A draft layer as the engine runs it.

    Attributes:
        plan: from token ids and given rows to rows with hidden states.
        shape: shape of its KV cache; has the blocks of the model's cache.
        head: hidden states to logits of the model's vocabulary.
        head_columns: columns of a row that the head reads.
        next_columns: columns of a row that the step of the next token is given.
    """

    plan: Plan
    shape: Shape
    head: DraftHead
    head_columns: range
    next_columns: range


@dataclass
class DraftLayers:
    """The draft layers of a model, of which each drafts the token after that of the layer before.

    Attributes:
        layers: the last one also drafts all tokens that follow.
        given: hidden states that the model kept to the rows that the first layer is given.
        kept_columns: columns of the model's results that the layers read.
    """

    layers: tuple[DraftLayer, ...]
    given: Callable[[Tensor], Tensor]
    kept_columns: range

    @property
    def block_size(self) -> int:
        """Positions per block."""
        return self.layers[0].shape.block_size

    @property
    def bytes_per_token(self) -> int:
        """Bytes of all layers' keys and values at a position."""
        return sum(layer.shape.bytes_per_token for layer in self.layers)
