"""A model restored from the plan cache: its plan, its output layer and its sizes, without modules."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

from torch import Tensor

from torch_armllm.kv_cache.shapes import Shape
from torch_armllm.ops.linear import dense_linear, int4_linear, int8_linear
from torch_armllm.plan.native import NativePlan


@dataclass(frozen=True)
class LogitScaling:
    """The operator by which some models scale their logits.

    Attributes:
        op: ``multiply`` or ``divide``.
        number: the second operand.
    """

    op: str
    number: float

    def __call__(self, logits: Tensor) -> Tensor:
        """Returns scaled logits in the same dtype."""
        return logits * self.number if self.op == "multiply" else logits / self.number


@dataclass
class HeadWeights:
    """An output layer that is one matrix product, and a scaling of its results.

    ``scheme`` is None for float weights.
    """

    weight: Tensor
    bias: Tensor | None
    scheme: str | None
    out_features: int
    scaling: LogitScaling | None = None
    digits: int = 1
    rotated: bool = False

    @property
    def tensors(self) -> list[Tensor]:
        """Weight, and bias if there is one."""
        return [t for t in (self.weight, self.bias) if t is not None]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Returns logits ``(R, vocab_size)`` of rows ``(R, hidden)``."""
        logits = self._product(hidden)
        return logits if self.scaling is None else self.scaling(logits)

    def _product(self, hidden: Tensor) -> Tensor:
        if self.scheme is None:
            return dense_linear(hidden, self.weight, self.bias)
        inputs = None, self.digits, self.rotated
        if self.scheme == "int8":
            return int8_linear(hidden, self.weight, self.out_features, self.bias, *inputs)
        return int4_linear(hidden, self.weight, self.out_features, self.scheme, self.bias, *inputs)

    def weights(self, like: Tensor) -> HeadWeights:
        """See `Head.weights`."""
        return self


@dataclass
class PlanModel:
    """A `torch_armllm.plan.servable_model.ServableModel` without modules; see there for the fields."""

    name: str
    plan: NativePlan
    shape: Shape
    vocab_size: int
    max_length: int | None
    first_position: int
    position_limit: int | None
    stated_positions: int
    head: HeadWeights
    generation_config: SimpleNamespace | None
