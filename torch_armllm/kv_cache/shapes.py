"""Shapes of the paged cache: keys and values per head, latents (MLA), or none but states."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor

from torch_armllm.kv_cache.states import NO_STATES, StateShape
from torch_armllm.ops.attention import (
    KvCache,
    keys_by_token,
    kv_cache_shapes,
    new_kv_cache,
    values_by_token,
)
from torch_armllm.ops.attention.cache_layout import zeros_on_huge_pages
from torch_armllm.ops.compress import most_per_block
from torch_armllm.ops.mla import latent_width, latents_by_token, new_latent_cache


class LatentCache(NamedTuple):
    """Latents of one layer ``(blocks, block_size, rank + rope_size)``, or of all, with layers in front.

    Rows of int8 have 8 more bytes, for scales.
    """

    latents: Tensor
    index_keys: Tensor | None = None
    """Keys of all indexers ``(indexers, blocks, block_size, index_size)``."""


class IndexedCache(NamedTuple):
    """The tensors of a `KvCache`, and the keys of indexers."""

    k: Tensor
    v: Tensor
    k_scales: Tensor | None
    v_scales: Tensor | None
    index_keys: Tensor
    """Keys of all indexers ``(indexers, blocks, block_size, index_size)``."""


class MixedCache(tuple[Tensor | None, ...]):
    """The tensors of the caches of all groups of layers, concatenated group after group."""


Cache = KvCache | IndexedCache | LatentCache | MixedCache
"""The tensors of a paged cache: layers are the first dimension, blocks the second."""


def _layer(cache: KvCache | IndexedCache, index: int) -> KvCache:
    scales = (None if t is None else t[index] for t in (cache.k_scales, cache.v_scales))
    return KvCache(cache.k[index], cache.v[index], *scales)


def _index_keys(indexers: int, blocks: int, size: int, block_size: int, dtype: torch.dtype) -> Tensor:
    """Allocates empty blocks for the keys of all indexers."""
    shape = (indexers, blocks, block_size, size)
    return new_latent_cache(indexers * blocks, size, 0, block_size, dtype).view(shape)


@dataclass(frozen=True)
class CacheShape:
    """Shape of one layer's keys and values; the same for all layers."""

    layers: int
    kv_heads: int
    head_size: int
    value_size: int
    dtype: torch.dtype
    block_size: int = 32
    """Positions per block; a multiple of 16 that divides 256."""
    indexers: int = 0
    """Number of indexers, which keep a key of each position."""
    index_size: int = 0
    """Elements of an indexer's key."""
    index_dtype: torch.dtype = torch.float32
    """Dtype of the indexers' keys."""
    states: StateShape = NO_STATES
    """States of the recurrent layers."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of all layers' keys and values, and of the indexers' keys, at one position."""
        keys, values, scales = kv_cache_shapes(
            1, 1, self.head_size, self.value_size, self.block_size, self.dtype
        )
        elements = sum(math.prod(sizes) for sizes in (keys, values)) // self.block_size
        one = elements * self.dtype.itemsize + (0 if scales is None else 2 * torch.float32.itemsize)
        index = self.indexers * self.index_size * self.index_dtype.itemsize
        return self.layers * self.kv_heads * one + index

    def tensors(self, blocks: int) -> Cache:
        """Allocates empty blocks of all layers."""
        sizes = (self.kv_heads, self.head_size, self.value_size)
        cache = new_kv_cache(blocks, *sizes, self.block_size, self.dtype, layers=self.layers)
        if not self.indexers:
            return cache
        return IndexedCache(
            *cache, _index_keys(self.indexers, blocks, self.index_size, self.block_size, self.index_dtype)
        )

    def at(self, index: int) -> CacheShape:
        """Returns the shape that writes and reads a layer."""
        return self

    def layer(self, cache: Cache, index: int) -> KvCache:
        """Returns the tensors of one layer, as views."""
        assert isinstance(cache, KvCache | IndexedCache)
        return _layer(cache, index)

    def write(self, layer: Cache, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Stores keys and values ``(heads, T, head_size or value_size)`` of one row in a layer's blocks."""
        assert isinstance(layer, KvCache)
        torch.ops.armllm.kv_write(
            *(x.transpose(0, 1).contiguous() for x in (keys, values)),
            layer.k,
            layer.v,
            slots,
            layer.k_scales,
            layer.v_scales,
        )

    def read(self, layer: Cache, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values ``(heads, positions, head_size or value_size)`` of blocks, as floats."""
        assert isinstance(layer, KvCache)
        scales = [None if t is None else t[blocks] for t in (layer.k_scales, layer.v_scales)]
        keys = keys_by_token(layer.k[blocks], scales[0])[..., : self.head_size]
        values = values_by_token(layer.v[blocks], scales[1])
        return keys.transpose(0, 1).flatten(1, 2), values.transpose(0, 1).flatten(1, 2)


@dataclass(frozen=True)
class MixedShape:
    """Shape of a cache in which layers differ in shape, or read the keys and values of other layers."""

    groups: tuple[CacheShape | LatentShape, ...]
    """Groups of layers of equal shape; the layers of a group need not be consecutive.  The last group of
    latents has the indexers of all layers."""
    positions: tuple[tuple[int, int], ...]
    """Group of each layer, and its index in the group; layers that share keys and values share both."""
    states: StateShape = NO_STATES
    """States of the recurrent layers."""

    @property
    def layers(self) -> int:
        """Number of layers, including those that read the keys and values of other layers."""
        return len(self.positions)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of keys and values."""
        return self.groups[0].dtype

    @property
    def block_size(self) -> int:
        """Positions per block."""
        return self.groups[0].block_size

    @property
    def bytes_per_token(self) -> int:
        """Bytes of all layers' keys and values at one position."""
        return sum(group.bytes_per_token for group in self.groups)

    def tensors(self, blocks: int) -> Cache:
        """Allocates empty blocks of all layers."""
        return MixedCache(tensor for group in self.groups for tensor in group.tensors(blocks))

    def layer(self, cache: Cache, index: int) -> KvCache | LatentCache:
        """Returns the tensors of one layer, as views of its group's."""
        assert isinstance(cache, MixedCache)
        group, number = self.positions[index]
        kinds: list[Any] = [LatentCache if isinstance(g, LatentShape) else KvCache for g in self.groups]
        begin = sum(len(kind._fields) for kind in kinds[:group])
        tensors = kinds[group](*cache[begin : begin + len(kinds[group]._fields)])
        return self.groups[group].layer(tensors, number)

    def at(self, index: int) -> CacheShape | LatentShape:
        """Returns the shape that writes and reads a layer."""
        return self.groups[self.positions[index][0]]


@dataclass(frozen=True)
class LatentShape:
    """Shape of one layer's latents; transformers sees latents as keys of one head, rotated keys as values."""

    layers: int
    rank: int
    rope_size: int
    dtype: torch.dtype
    block_size: int = 32
    expanded: int = 0
    """Elements that all layers' keys and values at one position would have if they were expanded."""
    indexers: int = 0
    """Number of indexers, which keep a key of each position."""
    index_size: int = 0
    """Elements of an indexer's key."""
    index_dtype: torch.dtype = torch.float32
    """Dtype of the indexers' keys."""
    states: StateShape = NO_STATES
    """States of the recurrent layers."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of all layers' latents, rotated keys and indexers' keys at one position."""
        row = latent_width(self.rank + self.rope_size, self.dtype) * self.dtype.itemsize
        return self.layers * row + self.indexers * self.index_size * self.index_dtype.itemsize

    def tensors(self, blocks: int) -> Cache:
        """Allocates empty blocks of all layers."""
        sizes = (self.rank, self.rope_size, self.block_size)
        every = new_latent_cache(self.layers * blocks, *sizes, self.dtype)
        latents = every.unflatten(0, (self.layers, blocks))
        if not self.indexers:
            return LatentCache(latents)
        keys = _index_keys(self.indexers, blocks, self.index_size, self.block_size, self.index_dtype)
        return LatentCache(latents, keys)

    def at(self, index: int) -> LatentShape:
        """Returns the shape that writes and reads a layer."""
        return self

    def layer(self, cache: Cache, index: int) -> LatentCache:
        """Returns the tensors of one layer, as views."""
        assert isinstance(cache, LatentCache)
        return LatentCache(cache.latents[index])

    def write(self, layer: Cache, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Stores latents ``(1, T, rank)`` and rotated keys ``(1, T, rope_size)`` in a layer's blocks."""
        assert isinstance(layer, LatentCache)
        torch.ops.armllm.mla_write(keys[0], values[0], layer.latents, slots)

    def read(self, layer: Cache, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Returns latents ``(1, positions, rank)`` and rotated keys ``(1, positions, rope_size)``."""
        assert isinstance(layer, LatentCache)
        rows = latents_by_token(layer.latents[blocks].flatten(0, 1)[None], self.rank)
        latents, k_rope = rows.split([self.rank, self.rope_size], -1)
        return latents, k_rope


class EntryGroup(NamedTuple):
    """Compressors of a model whose entries have the same size and stand for as many positions."""

    compressors: int
    size: int
    """Elements of an entry."""
    rate: int
    """Positions that an entry stands for."""


@dataclass(frozen=True)
class CompressedShape(LatentShape):
    """Shape of a cache of latents and of compressed entries, which lie in the blocks of their positions."""

    groups: tuple[EntryGroup, ...] = ()
    """The compressors."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of all layers' latents and entries at one position, rounded up."""
        rows = sum(g.compressors * g.size * most_per_block(self.block_size, g.rate) for g in self.groups)
        entries = -(-rows * self.dtype.itemsize // self.block_size)
        return super().bytes_per_token + entries

    def tensors(self, blocks: int) -> Cache:
        """Allocates empty blocks of all layers and compressors."""
        entries = []
        for count, size, rate in self.groups:
            shape = (count, blocks, most_per_block(self.block_size, rate), size)
            entries.append(zeros_on_huge_pages(shape, self.dtype))
        return MixedCache((LatentShape.tensors(self, blocks)[0], *entries))

    def layer(self, cache: Cache, index: int) -> LatentCache:
        """Returns the tensor of one layer's tokens, as a view."""
        latents = cache[0]
        assert latents is not None
        return LatentCache(latents[index])


@dataclass(frozen=True)
class StatesOnlyShape:
    """Shape of a cache without keys and values: all layers are recurrent, and keep a state of fixed size."""

    dtype: torch.dtype
    """Dtype of the model's hidden states."""
    block_size: int = 32
    """Positions per block; blocks hold nothing, and only count positions."""
    states: StateShape = NO_STATES
    """States of the recurrent layers."""

    layers: ClassVar[int] = 0
    bytes_per_token: ClassVar[int] = 0

    def tensors(self, blocks: int) -> Cache:
        """Returns no tensors."""
        return MixedCache()

    def at(self, index: int) -> NoReturn:
        """Raises, as no layer has keys and values."""
        raise ValueError("all layers are recurrent: none has keys and values in this cache")

    def layer(self, cache: Cache, index: int) -> NoReturn:
        """Raises, as `at` does."""
        self.at(index)


Shape = CacheShape | MixedShape | LatentShape | StatesOnlyShape


def latent_groups(shape: Shape) -> list[LatentShape]:
    """Returns the shapes of a cache's latents; none if it holds keys and values."""
    groups = shape.groups if isinstance(shape, MixedShape) else (shape,)
    return [group for group in groups if isinstance(group, LatentShape)]


def with_cache_dtype(shape: Shape, dtype: torch.dtype) -> Shape:
    """Returns the shape with another dtype of keys and values; latents keep theirs."""
    if isinstance(shape, MixedShape):
        parts = (replace(g, dtype=dtype) if isinstance(g, CacheShape) else g for g in shape.groups)
        return replace(shape, groups=tuple(parts))
    return replace(shape, dtype=dtype) if isinstance(shape, CacheShape) else shape


def with_key_heads(shape: Shape, heads: Mapping[int, int]) -> Shape:
    """Returns the shape with as many heads of keys and values as ``heads`` has for its own."""
    if isinstance(shape, MixedShape):
        parts = (
            replace(g, kv_heads=heads[g.kv_heads]) if isinstance(g, CacheShape) else g for g in shape.groups
        )
        return replace(shape, groups=tuple(parts))
    return replace(shape, kv_heads=heads[shape.kv_heads]) if isinstance(shape, CacheShape) else shape


def with_state_sizes(shape: Shape, sizes: Sequence[tuple[int, ...]]) -> Shape:
    """Returns the shape with other sizes of the states of each group."""
    groups = zip(shape.states.groups, sizes, strict=True)
    return replace(shape, states=StateShape(tuple(replace(group, sizes=own) for group, own in groups)))


def with_state_dtype(shape: Shape, dtype: torch.dtype) -> Shape:
    """Returns the shape with another dtype of the states that sum over all tokens."""
    return replace(shape, states=shape.states.stored_as(dtype))
