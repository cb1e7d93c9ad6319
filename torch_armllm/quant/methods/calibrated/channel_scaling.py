"""Channel scaling that does not change a model's outputs.

Channels that one module writes and others read are divided in the writer and multiplied in the readers.  The
scales are powers of two: they only change exponents, so the model computes the same bits, and dividing again
restores its weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from torch_armllm.quant.layers import weight_of
from torch_armllm.quant.offset_norm import divide, divides, narrow, widen

MAX_EXPONENT = 4
"""Largest exponent of a channel's scale, a power of two."""
_CHECKED_TOGETHER = 1 << 18


@dataclass(frozen=True, eq=False)
class ChannelScaling:
    """Channels that one module writes and other modules read.

    Attributes:
        writer: a norm, or a linear layer.
        readers: linear layers.
        repeat: query heads per KV head (grouped-query attention); 1 if each channel is read once.
        head: channels per head; 0 if each channel is read once.
        factor: what a norm of 1 + weight multiplies by, float32 (written,); None for all other writers.
    """

    writer: nn.Module
    readers: tuple[nn.Module, ...]
    repeat: int = 1
    head: int = 0
    factor: Tensor | None = None

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The writer and the readers."""
        return (self.writer, *self.readers)

    @property
    def written(self) -> int:
        """Number of channels that the writer writes."""
        return len(_rows(self.writer)[0])

    def spread(self, values: Tensor) -> Tensor:
        """Repeats one value per written channel for the channels that are read."""
        if self.repeat == 1:
            return values
        return values.view(-1, 1, self.head).expand(-1, self.repeat, -1).flatten()

    def gathered(self, values: Tensor) -> Tensor:
        """Returns the mean over the read channels of each written channel."""
        return values if self.repeat == 1 else values.view(-1, self.repeat, self.head).mean(1).flatten()

    def limited(self, powers: Tensor) -> Tensor:
        """Returns powers of two (written,) that are nearer to one where a weight would lose bits."""
        for _ in range(2 * MAX_EXPONENT):
            exact = self._exact(powers)
            if bool(exact.all()):
                return powers
            nearer = powers * torch.exp2(-powers.log2().sign())
            powers = torch.where(exact, powers, nearer)
        return powers

    @torch.no_grad()
    def apply(self, powers: Tensor) -> AppliedScaling:
        """Divides the written channels by powers of two (written,), and multiplies the readers by them."""
        originals = None
        if self.factor is not None:
            originals = widen(self.writer)
            divide(self.writer, self.factor, powers)
        else:
            self._multiply_writer(1 / powers)
        self._multiply_readers(powers)
        return AppliedScaling(self, powers, originals)

    @torch.no_grad()
    def revert(self, powers: Tensor, originals: dict[str, nn.Parameter] | None) -> None:
        """Reverts `apply`; ``originals`` are the writer's parameters if it is a norm of 1 + weight."""
        self._multiply_readers(1 / powers)
        if originals is not None:
            narrow(self.writer, originals)
        else:
            self._multiply_writer(powers)

    def _multiply_writer(self, powers: Tensor) -> None:
        for rows in _rows(self.writer):
            rows.mul_(powers if rows.dim() == 1 else powers[:, None])

    def _multiply_readers(self, powers: Tensor) -> None:
        factors = self.spread(powers)
        for reader in self.readers:
            _columns(reader).mul_(factors)

    def _exact(self, powers: Tensor) -> Tensor:
        """True for each written channel whose weights keep all their bits."""
        if self.factor is not None:
            exact = divides(self.factor, powers)
        else:
            exact = torch.ones(len(powers), dtype=torch.bool)
            for rows in _rows(self.writer):
                exact &= _exact_columns(rows.t(), 1 / powers)
        factors = self.spread(powers)
        for reader in self.readers:
            own = _exact_columns(_columns(reader), factors)
            exact &= own if self.repeat == 1 else own.view(-1, self.repeat, self.head).all(1).flatten()
        return exact


class AppliedScaling(NamedTuple):
    """A scaling, the powers of two (written,) that it was applied with, and what it replaced.

    Attributes:
        scaling: the scaling.
        powers: the powers of two.
        originals: the parameters of a norm of 1 + weight, which its new weight does not tell.
    """

    scaling: ChannelScaling
    powers: Tensor
    originals: dict[str, nn.Parameter] | None

    def undo(self) -> None:
        """Restores the weights bit for bit."""
        self.scaling.revert(self.powers, self.originals)


def undo_scalings(applied: Sequence[AppliedScaling]) -> None:
    """Restores the weights of scalings that were applied in this order."""
    for one in reversed(applied):
        one.undo()


def _rows(writer: nn.Module) -> list[Tensor]:
    """Returns views of a writer's parameters whose first axis is that of the written channels."""
    parameters = [p.detach() for p in writer.parameters(recurse=False)]
    return [p.t() if isinstance(writer, Conv1D) and p.dim() == 2 else p for p in parameters]


def _columns(reader: nn.Module) -> Tensor:
    """Returns a view of a reader's weight whose last axis is that of the read channels."""
    weight = weight_of(reader).detach()
    return weight.t() if isinstance(reader, Conv1D) else weight


def _exact_columns(weight: Tensor, factors: Tensor) -> Tensor:
    """True for each column of a weight (…, K) that loses no bits by its factor, a power of two."""
    rows = weight.reshape(-1, len(factors)) if weight.dim() == 1 else weight
    factors = factors.to(weight.dtype)
    exact = torch.ones(len(factors), dtype=torch.bool)
    for part in rows.split(max(1, _CHECKED_TOGETHER // len(factors))):
        exact &= (part * factors / factors == part).all(0)
    return exact
