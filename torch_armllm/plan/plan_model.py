"""A model of which there is no more than what an engine runs: its plan, its head, and a few numbers."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

from torch import Tensor

from torch_armllm.kv_cache.shapes import Shape
from torch_armllm.ops.linear import dense_linear, int4_linear, int8_linear
from torch_armllm.plan.native import NativePlan


@dataclass
class StoredForward:
    """What a `PatchedForward` tells an engine."""

    plan: NativePlan
    shape: Shape
    vocabulary: int
    longest: int | None
    first_position: int


@dataclass
class StoredHead:
    """An output layer without anything around it; ``scheme`` is None for float weights."""

    weight: Tensor
    bias: Tensor | None
    scheme: str | None
    out_features: int

    @property
    def tensors(self) -> list[Tensor]:
        """Weight and bias, if there is one."""
        return [t for t in (self.weight, self.bias) if t is not None]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits ``(R, vocabulary)`` of rows ``(R, hidden)``."""
        if self.scheme is None:
            return dense_linear(hidden, self.weight, self.bias)
        if self.scheme == "int8":
            return int8_linear(hidden, self.weight, self.out_features, self.bias)
        return int4_linear(hidden, self.weight, self.out_features, self.scheme, self.bias)


@dataclass
class StoredModel:
    """Stands for a patched model where only an engine asks.

    Attributes:
        kind: the model's class.
        forward: see `StoredForward`.
        head: from hidden states to logits.
        made_for, stated: positions, see `torch_armllm.engine.max_length`.
        generation_config: the settings that its makers recommend.
    """

    kind: str
    forward: StoredForward
    head: StoredHead
    made_for: int | None
    stated: int
    generation_config: SimpleNamespace | None
