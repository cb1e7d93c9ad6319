"""Keys and values of an encoder's tokens, which all steps of a decoder read and none writes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_armllm.kv_cache.shapes import CacheShape


class EncoderKeys:
    """The keys and values of a batch of texts, or other inputs of an encoder, for all layers of a decoder.

    Args:
        shape: shape of one layer's keys and values.
        lengths: number of the encoder's tokens of each text; at least 1.
    """

    def __init__(self, shape: CacheShape, lengths: Sequence[int]) -> None:
        assert min(lengths, default=1) > 0, "a text without tokens has nothing to attend to"
        self.shape = shape
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        size = shape.block_size
        blocks = (self.lengths + size - 1) // size
        firsts = blocks.cumsum(0) - blocks
        count = int(blocks.sum())
        columns = torch.arange(int(blocks.max()) if len(lengths) else 0)
        self.table = (firsts[:, None] + columns).clamp_(max=max(count - 1, 0)).int()
        self.tensors = shape.tensors(max(count, 1))
        self._slots = torch.cat(
            [torch.arange(n) + int(first) * size for n, first in zip(lengths, firsts, strict=True)]
            or [torch.empty(0, dtype=torch.int64)]
        )

    @classmethod
    def of(cls, layers: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype) -> EncoderKeys | None:
        """Returns those of one text; None for no layers.

        Args:
            layers: keys and values ``(heads, S, size)`` of each layer.
            dtype: of the cache.
        """
        if not layers:
            return None
        keys, values = layers[0]
        shape = CacheShape(len(layers), keys.shape[0], keys.shape[2], values.shape[2], dtype)
        found = cls(shape, [keys.shape[1]])
        for layer, both in enumerate(layers):
            found.write(layer, *both)
        return found

    @property
    def longest(self) -> int:
        """Most tokens of a text."""
        return int(self.lengths.max()) if len(self.lengths) else 0

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Stores a layer's keys and values ``(heads, T, size)``: the texts one after another."""
        self.shape.write(self.shape.layer(self.tensors, layer), keys, values, self._slots)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns a layer's keys and values ``(heads, positions, size)`` of each row's text, padded.

        The results have a first dimension of rows.
        """
        found = [self.shape.read(self.shape.layer(self.tensors, layer), row.long()) for row in self.table]
        keys, values = (torch.stack(side)[:, :, : self.longest] for side in zip(*found, strict=True))
        return keys, values

    def step(self, counts: Sequence[int]) -> tuple[Tensor, ...]:
        """Returns the inputs of a step: table, starts and lengths of each new token, keys, values.

        Args:
            counts: new tokens of each row.
        """
        repeats = torch.tensor(counts)
        table = self.table.repeat_interleave(repeats, 0)
        starts = torch.arange(len(table) + 1, dtype=torch.int32)
        keys, values = self.tensors[:2]
        assert keys is not None and values is not None
        return table, starts, self.lengths.repeat_interleave(repeats), keys, values

    def choose(self, rows: Sequence[int]) -> None:
        """Makes these the rows; texts are shared, not copied."""
        indices = torch.tensor(rows, dtype=torch.int64)
        self.table, self.lengths = self.table[indices], self.lengths[indices]
