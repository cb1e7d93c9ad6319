"""A step as tensors: what `Plan.run` takes."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_armllm.engine.cache_shape import Cache
from torch_armllm.engine.step import Scheduled, Step
from torch_armllm.plan import StepInputs


class Buffer:
    """Integers that Python writes one by one and tensors see.

    An element of a tensor takes microseconds to set, one of an array tens of nanoseconds; a step of eight
    answers sets forty of them.

    Args:
        code: of `array.array`: ``q`` (int64) or ``i`` (int32).
        size: elements.
    """

    def __init__(self, code: str, size: int) -> None:
        self.dtype = torch.int64 if code == "q" else torch.int32
        self.items: Any = array(code, bytes(size * self.dtype.itemsize))
        assert self.items.itemsize == self.dtype.itemsize

    def view(self, *shape: int) -> Tensor:
        """The first elements, on the same memory."""
        count = 1
        for n in shape:
            count *= n
        return torch.frombuffer(self.items, dtype=self.dtype, count=count).view(shape)


class BlockTable:
    """The blocks of the answers of a step, a row each; what a row holds already is not written again."""

    def __init__(self) -> None:
        self.width = 0
        self._reserve(8, 64)

    def _reserve(self, rows: int, width: int) -> None:
        self.rows, self.width = rows, width
        self._buffer = Buffer("i", rows * width)
        self._known: list[list[int]] = [[] for _ in range(rows)]
        self._views: dict[int, Tensor] = {}

    def fill(self, scheduled: list[Scheduled]) -> Tensor:
        """int32 ``(answers, width)``; behind an answer's blocks stands what was there before."""
        rows, width = self.rows, self.width
        while rows < len(scheduled):
            rows *= 2
        longest = max(len(s.answer.blocks) for s in scheduled)
        while width < longest:
            width *= 2
        if (rows, width) != (self.rows, self.width):
            self._reserve(rows, width)
        known, items = self._known, self._buffer.items
        for row, s in enumerate(scheduled):
            blocks = s.answer.blocks
            had = known[row]
            if had != blocks:
                same = len(had) if blocks[: len(had)] == had else 0
                first = row * width
                items[first + same : first + len(blocks)] = array("i", blocks[same:])
                known[row] = list(blocks)
        view = self._views.get(len(scheduled))
        if view is None:
            view = self._views[len(scheduled)] = self._buffer.view(len(scheduled), width)
        return view


class _Views:
    """Views of buffers by how much of them is used: a running batch asks for the same ones in every step."""

    def __init__(self, capacity: int, make: Callable[[int], tuple[Tensor, ...]]) -> None:
        self.capacity = capacity
        self._make = make
        self._made: dict[int, tuple[Tensor, ...]] = {}

    def __getitem__(self, size: int) -> tuple[Tensor, ...]:
        found = self._made.get(size)
        if found is None:
            found = self._made[size] = self._make(size)
        return found


class StepBuilder:
    """Writes steps into memory that stays, so that the tensors of one hold until the next is built.

    Args:
        cache: keys and values that steps work on.
        block_size: positions a block.
        first_position: of a text's first token, as the model counts.
    """

    def __init__(self, cache: Cache, block_size: int, first_position: int = 0) -> None:
        self.cache = cache
        self.block_size = block_size
        self.first_position = first_position
        self._table = BlockTable()
        self._reserve_tokens(512)
        self._reserve_sequences(64)

    def _reserve_tokens(self, tokens: int) -> None:
        ids, positions, slots = (Buffer("q", tokens) for _ in range(3))
        self._ids, self._positions, self._slots = ids.items, positions.items, slots.items
        self._by_tokens = _Views(tokens, lambda n: (ids.view(1, n), positions.view(1, n), slots.view(n)))

    def _reserve_sequences(self, sequences: int) -> None:
        starts, lengths = (Buffer("i", sequences + 1) for _ in range(2))
        self._starts, self._lengths = starts.items, lengths.items
        self._by_sequences = _Views(sequences, lambda n: (starts.view(n + 1), lengths.view(n)))

    def build(self, step: Step) -> StepInputs:
        """The tensors of a step, which must compute something."""
        scheduled = step.scheduled
        tokens = step.token_count
        assert tokens > 0
        if tokens > self._by_tokens.capacity:
            self._reserve_tokens(2 * tokens)
        if len(scheduled) > self._by_sequences.capacity:
            self._reserve_sequences(2 * len(scheduled))
        starts, lengths = self._starts, self._lengths
        at = longest = 0
        for number, s in enumerate(scheduled):
            if s.count == 1:
                self._write_one(at, s.answer, s.start)
            else:
                self._write_many(at, s)
            at += s.count
            end = s.start + s.count
            starts[number + 1] = at
            lengths[number] = end
            if end > longest:
                longest = end
        ids, positions, slots = self._by_tokens[tokens]
        query_start, seq_lens = self._by_sequences[len(scheduled)]
        table = self._table.fill(scheduled)
        return StepInputs(ids, positions, slots, table, query_start, seq_lens, longest, self.cache)

    def _write_one(self, at: int, answer: Any, position: int) -> None:
        known, size = answer.token_ids, self.block_size
        behind = position - len(known)
        self._ids[at] = known[position] if behind < 0 else answer.draft[behind]
        self._positions[at] = self.first_position + position
        self._slots[at] = answer.blocks[position // size] * size + position % size

    def _write_many(self, at: int, s: Scheduled) -> None:
        answer, start, end, size = s.answer, s.start, s.end, self.block_size
        ids = answer.token_ids[start:end]
        if len(ids) < s.count:
            ids = ids + answer.draft[: s.count - len(ids)]
        slots = array("q")
        first = start // size
        for block in answer.blocks[first : -(-end // size)]:
            slots.extend(range(block * size, (block + 1) * size))
        skipped = start - first * size
        after = at + s.count
        self._ids[at:after] = array("q", ids)
        self._positions[at:after] = array("q", range(self.first_position + start, self.first_position + end))
        self._slots[at:after] = slots[skipped : skipped + s.count]
