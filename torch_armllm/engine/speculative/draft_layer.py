"""A draft layer: one decoder layer that drafts tokens from the hidden states of the model that it serves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torch_armllm.kv_cache.shapes import Shape
from torch_armllm.plan.step import Plan


@dataclass
class DraftLayer:
    """A draft layer as the engine runs it.

    Attributes:
        plan: from token ids and given rows to hidden states, from which logits and the next token's given
            rows come.
        shape: shape of its KV cache; has the blocks of the model's cache.
        head: hidden states to logits of the model's vocabulary.
        given: hidden states that the model kept to the rows that the layer is given.
        kept_columns: columns of the model's results that the layer reads.
    """

    plan: Plan
    shape: Shape
    head: Callable[[Tensor], Tensor]
    given: Callable[[Tensor], Tensor]
    kept_columns: range


class NormedHead:
    """A head after a norm: logits of hidden states that are not normalized yet."""

    def __init__(self, norm: nn.Module, head: Callable[[Tensor], Tensor]) -> None:
        self._norm, self._head = norm, head

    @torch.no_grad()
    def __call__(self, hidden: Tensor) -> Tensor:
        """Returns the logits of rows ``(R, hidden)``."""
        return self._head(self._norm(hidden))
