"""transformers' cache interface over the paged KV cache, for ``generate`` and hand-written loops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from torch_armllm.kv_cache.block_pool import BlockPool
from torch_armllm.kv_cache.sequence_blocks import SequenceBlocks
from torch_armllm.kv_cache.shapes import Shape
from torch_armllm.patching.cache.cache_layers import PagedLayer, StateLayer


class TokenLog:
    """Tokens of a cache, for models whose modules cannot continue from it.

    Token ids, positions and mask of the batch, each ``(batch, length)`` int64, padding included.
    """

    def __init__(self, batch_size: int) -> None:
        self.ids = torch.zeros(batch_size, 0, dtype=torch.int64)
        self.positions = torch.zeros(batch_size, 0, dtype=torch.int64)
        self.kept = torch.zeros(batch_size, 0, dtype=torch.int64)

    def append(self, ids: Tensor, positions: Tensor, kept: Tensor | None) -> None:
        """Appends tokens; ``kept`` marks those that are not padding, None: all."""
        mask = torch.ones_like(ids) if kept is None else kept.long()
        self.ids = torch.cat([self.ids, ids], 1)
        self.positions = torch.cat([self.positions, positions], 1)
        self.kept = torch.cat([self.kept, mask], 1)

    def choose(self, indices: list[int]) -> None:
        """Keeps the rows ``indices``, in that order; an index may repeat."""
        self.ids, self.positions, self.kept = (x[indices] for x in (self.ids, self.positions, self.kept))

    def crop(self, length: int) -> None:
        """Keeps the first ``length`` positions."""
        self.ids, self.positions, self.kept = (x[:, :length] for x in (self.ids, self.positions, self.kept))


class PagedCache(DynamicCache):
    """A batch of sequences in one block pool.

    A row stores only the tokens that its attention mask keeps, so left padding needs no memory.  The length
    of the cache that transformers sees includes the padding.
    """

    pool: BlockPool
    rows: list[SequenceBlocks]
    padded_length: int
    columns: Tensor | None
    """bool ``(batch, padded_length)``: columns whose tokens the rows hold; None: the last ones of a row."""
    next_positions: list[int] | None
    """Position id of each row's next token; None: unknown, or the last column is padding in some row."""
    layer_kinds: Sequence[str] = ()
    """Kinds of the model's layers, as its config has them."""
    token_log: TokenLog | None
    """Tokens so far, if the modules cannot continue from this cache; else None."""

    def __init__(self, pool: BlockPool, batch_size: int = 0) -> None:
        super().__init__()
        self._begin(pool, batch_size)

    def _begin(self, pool: BlockPool, batch_size: int) -> None:
        self.pool = pool
        self.rows = [SequenceBlocks(self.pool) for _ in range(batch_size)]
        self.padded_length = 0
        self.columns = None
        self.next_positions = None
        self.token_log = None

    @classmethod
    def adopt(cls, cache: DynamicCache, pool: BlockPool, batch_size: int) -> PagedCache:
        """Turns a caller's dynamic cache into a paged cache with the same contents, in place.

        The caller keeps one cache object over the turns of a conversation, so this object must grow.
        """
        filled = [
            n
            for n, layer in enumerate(cache.layers)
            if getattr(layer, "is_initialized", False) and getattr(layer, "keys", None) is not None
        ]
        length = cache.get_seq_length() if filled else 0
        old = [(n, cache.layers[n].keys, cache.layers[n].values) for n in filled] if length else []
        cache.__class__ = cls
        cache.layers = []
        assert isinstance(cache, PagedCache)
        cache._begin(pool, batch_size)
        for layer, keys, values in old:
            cache._write_dense(layer, keys, values, new=layer == 0)
        cache.padded_length = length
        return cache

    def give_back(self, config: Any) -> None:
        """Turns this cache into an empty `DynamicCache` of transformers, in place."""
        for row in self.rows:
            row.release()
        self.__dict__.clear()
        self.__class__ = DynamicCache  # type: ignore[assignment]
        DynamicCache.__init__(self, config=config)

    # the interface to the paged step

    @property
    def shape(self) -> Shape:
        """Shape of the paged KV cache."""
        return self.pool.shape

    def filled_columns(self) -> Tensor:
        """Returns a mask bool ``(batch, padded_length)`` of the columns whose tokens the rows hold."""
        if self.columns is not None:
            return self.columns
        lengths = torch.tensor([row.length for row in self.rows], dtype=torch.int64)
        return torch.arange(self.padded_length) >= self.padded_length - lengths[:, None]

    def columns_with(self, kept: Tensor | None, count: int) -> Tensor | None:
        """Returns `columns` after a step, which the caller sets once the rows hold its tokens.

        Args:
            kept: mask bool ``(batch, count)`` of new tokens; None: all count.
            count: number of new columns.
        """
        if self.columns is None and (kept is None or not (self.padded_length or has_gap(kept))):
            return None
        new = torch.ones(len(self.rows), count, dtype=torch.bool) if kept is None else kept
        return torch.cat([self.filled_columns(), new], 1)

    def append_column(self) -> None:
        """Counts a column of which every row holds the token."""
        self.columns = self.columns_with(None, 1)
        self.padded_length += 1

    # the interface to the modules' own attention

    @property
    def layers(self) -> list[Any]:
        """Layers with ``keys`` and ``values``; made anew each time, as they keep the cache."""
        if not self.shape.states:
            return [PagedLayer(self, number) for number in range(self.shape.layers)]
        with_keys = [number for number, kind in enumerate(self.layer_kinds) if _has_keys(kind)]
        if len(with_keys) != self.shape.layers:
            return [StateLayer() for _ in self.layer_kinds]
        numbers = {number: place for place, number in enumerate(with_keys)}
        return [
            PagedLayer(self, numbers[number]) if number in numbers else StateLayer()
            for number in range(len(self.layer_kinds))
        ]

    @layers.setter
    def layers(self, layers: list[Any]) -> None:
        if layers:
            raise ValueError("the layers of a patched model's cache cannot be replaced; begin a new cache")

    def write_dense(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Stores keys and values of all columns in the place of a layer's present ones.

        Raises:
            ValueError: they have another shape.
        """
        before = self.read_dense(layer)
        for found, expected in zip((keys, values), before, strict=True):
            if found.shape != expected.shape:
                raise ValueError(
                    f"keys and values of a layer of this cache have the shape {tuple(expected.shape)}, and "
                    f"{tuple(found.shape)} was given; crop, batch_select_indices and reset of the cache "
                    "itself change the shape of all layers"
                )
        for row, filled, own_keys, own_values in zip(
            self.rows, self.filled_columns(), keys, values, strict=True
        ):
            slots = torch.tensor(row.slots(), dtype=torch.int64)
            stored = (own_keys[:, filled], own_values[:, filled])
            self.shape.at(layer).write(self.pool.layer(layer), *stored, slots)

    def _write_dense(self, layer: int, keys: Tensor, values: Tensor, new: bool) -> None:
        count = keys.shape[2]
        for number, row in enumerate(self.rows):
            positions = row.append(count) if new else row.slots()[-count:] if count else []
            slots = torch.tensor(positions, dtype=torch.int64)
            cache = self.pool.layer(layer)
            self.shape.at(layer).write(cache, keys[number], values[number], slots)

    def read_dense(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns a layer's keys and values ``(batch, heads, padded_length, size)``; padding is zeros."""
        cache, columns = self.pool.layer(layer), self.filled_columns()
        padded: tuple[list[Tensor], list[Tensor]] = ([], [])
        for row, filled in zip(self.rows, columns, strict=True):
            blocks = torch.tensor(row.blocks, dtype=torch.int64)
            for side, stored in zip(padded, self.shape.at(layer).read(cache, blocks), strict=True):
                dense = stored.new_zeros(stored.shape[0], self.padded_length, stored.shape[2])
                dense[:, filled] = stored[:, : row.length]
                side.append(dense)
        keys, values = (torch.stack(side) for side in padded)
        return keys, values

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores new keys and values; returns all of the layer's, dense, for a module's own attention."""
        first = layer_idx == 0
        if first:
            if not self.rows:
                self.rows = [SequenceBlocks(self.pool) for _ in range(key_states.shape[0])]
            columns = self.columns_with(None, key_states.shape[2])
            self.columns, self.padded_length = columns, self.padded_length + key_states.shape[2]
            self.next_positions = None
        self._write_dense(layer_idx, key_states, value_states, new=first)
        keys, values = self.read_dense(layer_idx)
        return keys.to(key_states.dtype), values.to(value_states.dtype)

    # the rest of transformers' cache interface

    def __repr__(self) -> str:
        return (
            f"PagedCache(batch_size={len(self.rows)}, length={self.padded_length}, blocks={len(self.pool)})"
        )

    def __len__(self) -> int:
        return self.shape.layers

    def __iter__(self) -> Any:
        for layer in range(self.shape.layers):
            yield (*self.read_dense(layer), None)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns the length of the batch in positions, padding included."""
        return self.padded_length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Returns length and offset of the keys that a step of ``query_length`` tokens sees."""
        # holds before layer 0 is updated: from then on padded_length includes this step's tokens
        return self.padded_length + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Returns -1: there is no limit."""
        return -1

    @property
    def is_compileable(self) -> bool:
        """Always False: the length is a Python number."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Always True: memory is allocated from the start."""
        return True

    @property
    def is_croppable(self) -> bool:
        """False for models with recurrent layers, whose states cannot go back."""
        return not self.shape.states

    @property
    def is_sliding(self) -> list[bool]:
        """False for each layer: no layer drops positions, as attention applies sliding windows itself."""
        return [False] * self.shape.layers

    @property
    def is_linear(self) -> list[bool]:
        """False for each layer with keys and values; states of recurrent layers are not counted as layers."""
        return [False] * self.shape.layers

    @property
    def is_dummy(self) -> list[bool]:
        """False for each layer: none is a placeholder."""
        return [False] * self.shape.layers

    @property
    def batch_size(self) -> int:
        """Number of rows of the batch, or -1 before the first step."""
        return len(self.rows) or -1

    def activate_past_recording(self) -> None:
        """Does nothing: no position is ever dropped."""

    def is_recording_past(self, layer_idx: int) -> bool:
        """Always True: every position is kept."""
        return True

    def reset(self) -> None:
        """Removes all positions and keeps the memory."""
        self.next_positions = None
        for row in self.rows:
            row.release()
        self.padded_length = 0
        self.columns = None
        if self.token_log is not None:
            self.token_log.crop(0)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last ``-tokens_to_remove`` positions of every row."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove must be negative or 0, got {tokens_to_remove}")
        count = min(-tokens_to_remove, self.padded_length)
        self.next_positions = None
        if count and self.rows:
            left = self.filled_columns()[:, : self.padded_length - count]
            for row, length in zip(self.rows, left.sum(1).tolist(), strict=True):
                row.truncate(length)
            self.columns = None if self.columns is None else left
        self.padded_length -= count
        if self.token_log is not None:
            self.token_log.crop(self.padded_length)

    def _choose(self, indices: list[int]) -> None:
        chosen = [self.rows[i].fork() for i in indices]
        for row in self.rows:
            row.release()
        self.rows = chosen
        self.columns = None if self.columns is None else self.columns[indices]
        self.next_positions = None
        if self.token_log is not None:
            self.token_log.choose(indices)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keeps the rows that the beams continue; blocks are shared, not copied."""
        self._choose(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row ``repeats`` times; blocks are shared, not copied."""
        self._choose([i for i in range(len(self.rows)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows of these indices, or of a boolean mask."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        self._choose(indices.tolist())


def _has_keys(kind: str) -> bool:
    """True for the kinds of layers that attend to tokens, as transformers names them."""
    return kind.endswith("attention") and not kind.startswith("linear")


def has_gap(columns: Tensor) -> bool:
    """True if a hidden token follows one that counts, in a row of a mask ``(batch, T)``."""
    return bool((columns[:, :-1] & ~columns[:, 1:]).any())
