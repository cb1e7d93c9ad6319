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

from torch_armllm.quant.methods.calibrated.channels import Channels
from torch_armllm.quant.offset_norm import divide, divides, narrow, widen

MAX_EXPONENT = 4
"""Largest exponent of a channel's scale, a power of two."""


@dataclass(frozen=True, eq=False)
class ChannelScaling:
    """Channels that one module writes and other modules read.

    Attributes:
        writer: a norm, a linear layer, or experts.
        readers: linear layers, routers and experts.
        repeat: query heads per KV head (grouped-query attention); 1 if each channel is read once.
        head: channels per head; 0 if each channel is read once.
        factor: what a norm of 1 + weight multiplies by, float32 (written,); None for all other writers.
    """

    writer: Channels
    readers: tuple[Channels, ...]
    repeat: int = 1
    head: int = 0
    factor: Tensor | None = None

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The writer and the readers."""
        return (self.writer.module, *(reader.module for reader in self.readers))

    @property
    def written(self) -> int:
        """Number of channels that the writer writes."""
        return self.writer.count_written

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
        for _ in range(MAX_EXPONENT):
            exact = self._exact(powers)
            if bool(exact.all()):
                break
            powers = torch.where(exact, powers, powers * torch.exp2(-powers.log2().sign()))
        return powers

    @torch.no_grad()
    def apply(self, powers: Tensor) -> AppliedScaling:
        """Divides the written channels by powers of two (written,), and multiplies the readers by them."""
        originals = None
        if self.factor is None:
            self.writer.multiply_written(1 / powers)
        else:
            originals = widen(self.writer.module)
            divide(self.writer.module, self.factor, powers)
        self._multiply_readers(powers)
        return AppliedScaling(self, powers, originals)

    @torch.no_grad()
    def revert(self, powers: Tensor, originals: dict[str, nn.Parameter] | None) -> None:
        """Reverts `apply`; ``originals`` are the writer's parameters if it is a norm of 1 + weight."""
        self._multiply_readers(1 / powers)
        if originals is None:
            self.writer.multiply_written(powers)
        else:
            narrow(self.writer.module, originals)

    def _multiply_readers(self, powers: Tensor) -> None:
        factors = self.spread(powers)
        for reader in self.readers:
            reader.multiply_read(factors)

    def _exact(self, powers: Tensor) -> Tensor:
        """True for each written channel whose weights keep all their bits."""
        exact = self.writer.exact_written(1 / powers) if self.factor is None else divides(self.factor, powers)
        factors = self.spread(powers)
        for reader in self.readers:
            own = reader.exact_read(factors)
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
