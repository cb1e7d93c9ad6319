"""transformers' cache interface over the paged KV cache, for ``generate`` and hand-written loops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from torch_armllm.kv_cache.block_pool import BlockPool
from torch_armllm.kv_cache.sequence_blocks import SequenceBlocks
from torch_armllm.kv_cache.shapes import Shape
from torch_armllm.patching.token_log import TokenLog


class PagedCache(DynamicCache):
    """A batch of sequences in one block pool.

    A row stores only the tokens that its attention mask keeps, so left padding needs no memory.  The length
    of the cache that transformers sees includes the padding.
    """

    pool: BlockPool
    rows: list[SequenceBlocks]
    padded_length: int
    next_positions: list[int] | None
    """Position id of each row's next token; None: unknown, or the last column is padding in some row."""
    token_log: TokenLog | None
    """Tokens so far, if the modules cannot continue from this cache; else None."""

    def __init__(self, pool: BlockPool, batch_size: int = 0) -> None:
        super().__init__()
        self._begin(pool, batch_size)

    def _begin(self, pool: BlockPool, batch_size: int) -> None:
        self.pool = pool
        self.rows = [SequenceBlocks(self.pool) for _ in range(batch_size)]
        self.padded_length = 0
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

    # the interface to the modules' own attention

    def _write_dense(self, layer: int, keys: Tensor, values: Tensor, new: bool) -> None:
        count = keys.shape[2]
        for number, row in enumerate(self.rows):
            positions = row.append(count) if new else row.slots()[-count:] if count else []
            slots = torch.tensor(positions, dtype=torch.int64)
            cache = self.pool.layer(layer)
            self.shape.at(layer).write(cache, keys[number], values[number], slots)

    def _read_dense(self, layer: int) -> tuple[Tensor, Tensor]:
        total, cache = self.padded_length, self.pool.layer(layer)
        padded = []
        for row in self.rows:
            blocks = torch.tensor(row.blocks, dtype=torch.int64)
            keys, values = self.shape.at(layer).read(cache, blocks)
            padding = total - row.length
            padded.append(
                [torch.nn.functional.pad(x[:, : row.length], (0, 0, padding, 0)) for x in (keys, values)]
            )
        keys, values = (torch.stack(side) for side in zip(*padded, strict=True))
        return keys, values

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores new keys and values; returns all of the layer's, dense, for a module's own attention."""
        first = layer_idx == 0
        if first:
            if not self.rows:
                self.rows = [SequenceBlocks(self.pool) for _ in range(key_states.shape[0])]
            self.padded_length += key_states.shape[2]
            self.next_positions = None
        self._write_dense(layer_idx, key_states, value_states, new=first)
        keys, values = self._read_dense(layer_idx)
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
            yield (*self._read_dense(layer), None)

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
        if self.token_log is not None:
            self.token_log.crop(0)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last ``-tokens_to_remove`` positions of every row."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove must be negative or 0, got {tokens_to_remove}")
        count = min(-tokens_to_remove, self.padded_length)
        self.next_positions = None
        for row in self.rows:
            row.truncate(max(0, row.length - count))
        self.padded_length -= count
        if self.token_log is not None:
            self.token_log.crop(self.padded_length)

    def _choose(self, indices: list[int]) -> None:
        chosen = [self.rows[i].fork() for i in indices]
        for row in self.rows:
            row.release()
        self.rows = chosen
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
