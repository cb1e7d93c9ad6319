"""The slots of a model's layers, and those of them that a process's plan reads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:  # imports modules that an engine from the plan cache does not need
    from torch_armllm.lora.slots import LoraSlots, Slots

Factors = Mapping[str, tuple[Tensor, ...]]
"""Factors of an adapter by the names of layers, as their slots hold them; see `LoraSlots.prepare`."""


@dataclass(frozen=True)
class SlotSet:
    """The slots of a model's layers.

    Attributes:
        layers: slots by the names of their layers: those of the whole model, by which adapters are checked.
        own: names of the layers that this process computes, whole or some columns.
        head: the slots of the head, which are among the layers'; None: it has none, or another process
            computes it.
        ranks: number of tensor parallel ranks; experts of several have no slots.
    """

    layers: Mapping[str, Slots]
    own: Collection[str]
    head: LoraSlots | None = None
    ranks: int = 1

    @property
    def _first(self) -> Slots:
        return next(layer for layer in self.layers.values() if layer is not self.head)  # the head is the last

    @property
    def count(self) -> int:
        """Number of adapters that fit."""
        return self._first.slots

    @property
    def rows(self) -> Tensor:
        """int32 ``(L,)``: slot of each row of a step; −1 for none."""
        return self._first.adapters

    @property
    def logit_rows(self) -> Tensor | None:
        """int32 ``(L,)``: likewise of the rows that need logits; None: the head has no slots here."""
        return None if self.head is None else self.head.adapters

    def clear(self, slot: int) -> None:
        """Empties a slot of all layers."""
        for name in self.own:
            self.layers[name].clear(slot)

    def write(self, slot: int, name: str, factors: tuple[Tensor, ...]) -> None:
        """Writes an adapter's factors of a layer to a slot, if this process computes the layer."""
        if name in self.own:
            self.layers[name].write(slot, *factors)


Share = Callable[[int, Factors], None]
"""Writes an adapter to a slot of all other processes."""
