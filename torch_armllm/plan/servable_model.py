"""The interface between a model and the engine that serves it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from torch_armllm.kv_cache.shapes import Shape
from torch_armllm.plan.plan_model import HeadWeights
from torch_armllm.plan.step import Plan

if TYPE_CHECKING:  # imports modules that an engine from the plan cache does not need
    from torch_armllm.lora.slot_set import SlotSet


class Head(Protocol):
    """The output layer: hidden states to logits."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """Returns logits ``(R, vocab_size)`` of rows ``(R, hidden)``."""
        ...

    def weights(self, like: Tensor) -> HeadWeights | None:
        """Returns the weights of a head that is one matrix product; None for any other head.

        Args:
            like: hidden states of the model; their values do not matter.
        """
        ...


class ServableModel(Protocol):
    """A causal language model as the engine sees it.

    Implemented by `torch_armllm.patching.patched_model.PatchedModel` and by
    `torch_armllm.plan.plan_model.PlanModel`.
    """

    @property
    def name(self) -> str:
        """Class name of the model."""
        ...

    @property
    def plan(self) -> Plan:
        """Computes hidden states of a step."""
        ...

    @property
    def shape(self) -> Shape:
        """Shape of the paged KV cache."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the model embeds."""
        ...

    @property
    def max_length(self) -> int | None:
        """Length of the longest sequence that the plan supports, in tokens; None: no limit."""
        ...

    @property
    def first_position(self) -> int:
        """Position id of the first token."""
        ...

    @property
    def position_limit(self) -> int | None:
        """Most positions that the model supports; None if its rotary embedding grows with the sequence."""
        ...

    @property
    def stated_positions(self) -> int:
        """``max_position_embeddings`` of the config, or a default."""
        ...

    @property
    def head(self) -> Head:
        """The output layer."""
        ...

    @property
    def slots(self) -> SlotSet | None:
        """Those for adapters that the plan reads; None: there are none."""
        ...

    @property
    def generation_config(self) -> Any:
        """Generation settings that the model's authors recommend, or None."""
        ...
