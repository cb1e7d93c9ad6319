"""A model without modules: its plan, its output layer and its sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

from torch import Tensor

from torch_armllm.kv_cache.shapes import Shape
from torch_armllm.ops.collective import gather_columns
from torch_armllm.ops.linear import dense_linear, int4_linear, int8_linear
from torch_armllm.ops.linear.schemes import PANEL
from torch_armllm.ops.lora import BLOCK
from torch_armllm.parallel.rank_group import RankGroup, shares
from torch_armllm.plan.native import NativePlan

if TYPE_CHECKING:  # imports modules that an engine from the plan cache does not need
    from torch_armllm.lora.slot_set import SlotSet
    from torch_armllm.lora.slots import LoraSlots


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


@dataclass(frozen=True)
class HeadRanks:
    """Tensor parallel ranks that compute logits together.

    Attributes:
        communicator: handle, see `torch_armllm.ops.collective.open_communicator`.
        rank: number of this process.
        columns: logits that each rank computes, one rank after another.
    """

    communicator: int
    rank: int
    columns: list[int]

    @property
    def first(self) -> int:
        """Token of this rank's first logit."""
        return sum(self.columns[: self.rank])

    @property
    def last_first(self) -> int:
        """Token of the last rank's first logit."""
        return sum(self.columns[:-1])

    def own_below(self, bound: int) -> int:
        """Returns how many of this rank's logits belong to tokens below a bound."""
        return min(max(bound - self.first, 0), self.columns[self.rank])


@dataclass
class HeadWeights:
    """An output layer that is one matrix product, and a scaling of its results.

    ``scheme`` is None for float weights.  With ``ranks`` the weight has the rows of this rank only, and all
    ranks compute logits together.  ``lora`` adds adapters to the logits before they are scaled.
    """

    weight: Tensor
    bias: Tensor | None
    scheme: str | None
    out_features: int
    scaling: LogitScaling | None = None
    digits: int = 1
    rotated: bool = False
    ranks: HeadRanks | None = None
    lora: LoraSlots | None = None

    @property
    def own_features(self) -> int:
        """Number of logits that this process computes."""
        return self.out_features if self.ranks is None else self.ranks.columns[self.ranks.rank]

    def shard(self, group: RankGroup) -> HeadWeights:
        """Returns the part of a rank, in memory of its own; all ranks gather the logits of all parts.

        Slots for adapters keep what the rank computes.
        """
        step = 1 if self.scheme is None else PANEL if self.lora is None else BLOCK
        parts = shares(-(-self.out_features // step), group.size)
        ends = [min(part.stop * step, self.out_features) for part in parts]
        columns = [end - part.start * step for part, end in zip(parts, ends, strict=True)]
        if min(columns) < 1:
            raise ValueError(f"{self.out_features} logits cannot be shared out among {group.size} ranks")
        own = parts[group.rank]
        first = own.start * step
        rows = 1 if self.scheme is None else PANEL
        weight = self.weight[first // rows : -(-(first + columns[group.rank]) // rows)].clone()
        if self.lora is not None:
            self.lora.keep(((first, first + columns[group.rank]),), weight=weight)
        return replace(
            self,
            weight=weight,
            bias=None if self.bias is None else self.bias[first : first + columns[group.rank]].clone(),
            ranks=HeadRanks(group.communicator, group.rank, columns),
        )

    def without_weights(self) -> HeadWeights:
        """Returns the layer for a process that computes no logits."""
        return replace(self, weight=self.weight[:0].clone(), bias=None, lora=None)

    @property
    def tensors(self) -> list[Tensor]:
        """Weight, and bias if there is one."""
        return [t for t in (self.weight, self.bias) if t is not None]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Returns logits ``(R, vocab_size)`` of rows ``(R, hidden)``."""
        logits = self._product(hidden)
        if self.lora is not None:
            logits = self.lora(logits, hidden)
        if self.ranks is not None:
            logits = gather_columns(logits, self.ranks.communicator, self.ranks.columns)
        return logits if self.scaling is None else self.scaling(logits)

    def _product(self, hidden: Tensor) -> Tensor:
        if self.scheme is None:
            return dense_linear(hidden, self.weight, self.bias)
        inputs = None, self.digits, self.rotated
        if self.scheme == "int8":
            return int8_linear(hidden, self.weight, self.own_features, self.bias, *inputs)
        return int4_linear(hidden, self.weight, self.own_features, self.scheme, self.bias, *inputs)

    def weights(self, like: Tensor) -> HeadWeights:
        """See `Head.weights`."""
        return self


@dataclass
class PlanModel:
    """A `torch_armllm.plan.servable_model.ServableModel` without modules; see there for the fields.

    ``slots`` are those for adapters; None: there are none.
    """

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
    slots: SlotSet | None = None
