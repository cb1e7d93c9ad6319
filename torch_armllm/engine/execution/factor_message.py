"""An adapter's factors as messages to other ranks, which write those of their layers and columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from torch_armllm.lora.slot_set import Factors, SlotSet

_MOST_BYTES = 4 << 20
"""Bytes of factors in a message: memory of mailboxes is kept."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)


class FactorPiece(NamedTuple):
    """Adjacent bytes of one of the factors that an adapter has for a layer.

    Attributes:
        slot: of the adapter.
        layer: number of the layer; −1 begins an adapter, and has no bytes.
        places: number of the layer's factors, which follow each other.
        place: number of this one.
        dtype: number of its dtype.
        first: number of the first of the bytes.
        shape: of the whole factor.
        content: the bytes.
    """

    slot: int
    layer: int = -1
    places: int = 0
    place: int = 0
    dtype: int = 0
    first: int = 0
    shape: tuple[int, ...] = ()
    content: Tensor = torch.empty(0, dtype=torch.uint8)

    @property
    def numbers(self) -> Sequence[int]:
        """See `Message.numbers`."""
        return [*self[:6], *self.shape]

    @property
    def tensors(self) -> Sequence[Tensor]:
        """See `Message.tensors`."""
        return [self.content]

    @classmethod
    def of(cls, numbers: list[int], content: Tensor) -> Self:
        """See `Message.of`."""
        slot, layer, places, place, dtype, first, *shape = numbers
        return cls(slot, layer, places, place, dtype, first, tuple(shape), content)


def factor_pieces(slot: int, layers: list[str], factors: Factors) -> Iterator[FactorPiece]:
    """Yields an adapter, piece by piece.

    Args:
        slot: of the adapter.
        layers: names of all layers of the model that have slots, in an order that all ranks know.
        factors: by the names of layers.
    """
    yield FactorPiece(slot)
    for number, name in enumerate(layers):
        given = factors.get(name, ())
        for place, factor in enumerate(given):
            content = factor.contiguous().view(-1).view(torch.uint8)
            about = slot, number, len(given), place, _DTYPES.index(factor.dtype)
            for first in range(0, max(1, len(content)), _MOST_BYTES):
                yield FactorPiece(*about, first, tuple(factor.shape), content[first : first + _MOST_BYTES])


class FactorWriter:
    """Writes the adapters that a leader sends.

    Args:
        slots: of this process.
    """

    def __init__(self, slots: SlotSet) -> None:
        self._slots = slots
        self._names = list(slots.layers)
        self._factors: list[Tensor] = []

    def add(self, piece: FactorPiece) -> None:
        """Takes the next piece; a layer's slot is written with the last one of its factors."""
        if piece.layer < 0:
            self._slots.clear(piece.slot)
            return
        if piece.first == 0:
            self._factors.append(torch.empty(piece.shape, dtype=_DTYPES[piece.dtype]))
        content = self._factors[-1].view(-1).view(torch.uint8)
        end = piece.first + len(piece.content)
        content[piece.first : end] = piece.content
        if end == len(content) and piece.place == piece.places - 1:
            self._slots.write(piece.slot, self._names[piece.layer], tuple(self._factors))
            self._factors = []
