"""Decode steps of a batch on a paged cache, with buffers that all steps reuse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from torch_armllm.patching.cache.paged_cache import PagedCache
from torch_armllm.plan.block_table import BlockTable
from torch_armllm.plan.fused_head import FusedHead
from torch_armllm.plan.shared_buffer import SharedBuffer
from torch_armllm.plan.step import StepInputs, StepResult

if TYPE_CHECKING:
    from torch_armllm.patching.forwards.decoder_calls import DecoderCalls


class DecodeSteps:
    """Computes one further token of each row of a cache, step after step.

    Args:
        calls: of a base model, by the plan.
        head: its plan, fused with the output layer.
        cache: its rows hold all tokens so far, and know the positions of the next ones.
    """

    def __init__(self, calls: DecoderCalls, head: FusedHead, cache: PagedCache) -> None:
        self._calls = calls
        self._head = head
        self._cache = cache
        self._limit = calls.kind.position_limit
        count = len(cache.rows)
        ids, places, slots = (SharedBuffer("q", count) for _ in range(3))
        lengths = SharedBuffer("i", count)
        self._ids, self._positions, self._slots, self._lengths = (
            buffer.items for buffer in (ids, places, slots, lengths)
        )
        assert cache.next_positions is not None
        for row, position in enumerate(cache.next_positions):
            self._positions[row] = position - 1
        self._views = (ids.view(1, count), places.view(1, count), slots.view(count))
        self._seq_lens = lengths.view(count)
        self._starts = torch.arange(count + 1, dtype=torch.int32)
        self._table = BlockTable()
        self._table.reserve_rows(count)
        self._inputs: StepInputs | None = None

    @property
    def has_room(self) -> bool:
        """True if the plan can compute a further token."""
        most, gap_limit = self._calls.max_length, self._calls.limits.gap_limit
        if self._cache.columns is not None and gap_limit is not None:
            most = gap_limit if most is None else min(most, gap_limit)
        return most is None or self._cache.padded_length < most

    def decode(self, token_ids: Sequence[int]) -> StepResult:
        """Appends one token to each row; returns the logits after it, valid until the next step.

        Raises:
            IndexError: a token id is not the model's.
            ValueError: a position is past the model's last one.
        """
        return self._head.run(self._prepared(token_ids))

    def _prepared(self, token_ids: Sequence[int]) -> StepInputs:
        """Writes the inputs of the next step; the same object as long as the memory is the same."""
        calls, cache, table = self._calls, self._cache, self._table
        positions, lengths = self._positions, self._lengths
        calls.check_ids(min(token_ids), max(token_ids))
        if self._limit is not None and max(positions) + 1 >= self._limit:
            calls.check_position(max(positions) + 1)
        for number, (row, token_id) in enumerate(zip(cache.rows, token_ids, strict=True)):
            (self._slots[number],) = row.append(1)
            self._ids[number] = token_id
            positions[number] += 1
            lengths[number] = row.length
            if table.written[number] != row.blocks:
                table.write(number, row.blocks)
        cache.append_column()
        cache.next_positions = [position + 1 for position in positions]
        if cache.token_log is not None:
            ids, places, _ = self._views
            cache.token_log.append(ids.view(-1, 1).clone(), places.view(-1, 1).clone(), None)
        inputs = self._inputs
        if inputs is None or self._has_moved(inputs):
            inputs = self._inputs = self._new_inputs()
        inputs.max_seq_len = max(lengths)
        return inputs

    def _has_moved(self, inputs: StepInputs) -> bool:
        """True if a tensor that steps read has grown, and so is another one."""
        pool, count = self._cache.pool, len(self._cache.rows)
        return (
            inputs.cache is not pool.cache
            or inputs.states is not pool.states.tensors
            or inputs.block_table is not self._table.view(count)
        )

    def _new_inputs(self) -> StepInputs:
        pool, rows = self._cache.pool, self._cache.rows
        slots = [row.state for row in rows if row.state is not None]
        return StepInputs(
            *self._views,
            self._table.view(len(rows)),
            self._starts,
            self._seq_lens,
            0,
            pool.cache,
            pool.states.tensors,
            torch.tensor(slots, dtype=torch.int64) if pool.states.tensors else None,
        )
