"""transformers' cache interface over the keys and values of an encoder's tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from torch_armllm.kv_cache.encoder_keys import EncoderKeys
from torch_armllm.kv_cache.shapes import CacheShape


class EncoderCache(DynamicCache):
    """The cross-attention cache of a batch.  Padding of the encoder's texts takes no memory."""

    encoder: EncoderKeys
    kept: Tensor
    """bool ``(batch, S)``: the encoder's tokens that are no padding."""

    @classmethod
    def adopt(cls, cache: DynamicCache, kept: Tensor) -> EncoderCache:
        """Turns a cache that modules filled into one that steps read, in place.

        Args:
            cache: keys and values ``(batch, heads, S, size)`` of each layer.
            kept: bool ``(batch, S)``: the tokens that are no padding.
        """
        layers = [(layer.keys, layer.values) for layer in cache.layers]
        (keys, values), dtype = layers[0], layers[0][0].dtype
        shape = CacheShape(len(layers), keys.shape[1], keys.shape[3], values.shape[3], dtype)
        encoder = EncoderKeys(shape, kept.sum(1).tolist())
        for number, both in enumerate(layers):
            encoder.write(number, *(x.transpose(1, 2)[kept].transpose(0, 1) for x in both))
        cache.__class__ = cls
        cache.layers = []
        assert isinstance(cache, EncoderCache)
        cache.encoder, cache.kept = encoder, kept
        return cache

    def give_back(self) -> None:
        """Turns this cache into a `DynamicCache` of transformers with the same contents, in place."""
        encoder, kept = self.encoder, self.kept
        self.__dict__.clear()
        self.__class__ = DynamicCache  # type: ignore[assignment]
        DynamicCache.__init__(self)
        for layer in range(encoder.shape.layers):
            self.update(*(_scattered(x, kept) for x in encoder.read(layer)), layer)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns the number of the encoder's tokens, padding included."""
        return int(self.kept.shape[1])

    def __len__(self) -> int:
        return self.encoder.shape.layers

    def __iter__(self) -> Any:
        for layer in range(len(self)):
            yield (*(_scattered(x, self.kept) for x in self.encoder.read(layer)), None)

    def choose(self, rows: list[int]) -> None:
        """Makes these the rows; they share their texts."""
        self.encoder.choose(rows)
        self.kept = self.kept[rows]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keeps the rows that the beams continue; they share their texts."""
        self.choose(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row ``repeats`` times."""
        self.choose([i for i in range(len(self.kept)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows of these indices, or of a boolean mask."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        self.choose(indices.tolist())


def _scattered(packed: Tensor, kept: Tensor) -> Tensor:
    """Returns ``(batch, heads, positions, size)``, the kept tokens first, with each token in its place."""
    batch, heads, positions, size = packed.shape
    out = packed.new_zeros(batch, kept.shape[1], heads, size)
    counts = kept.sum(1, keepdim=True)
    out[kept] = packed.transpose(1, 2)[torch.arange(positions) < counts]
    return out.transpose(1, 2)
