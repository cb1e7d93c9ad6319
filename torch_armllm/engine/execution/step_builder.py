"""Builds the input tensors of a step for `Plan.run`."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torch_armllm.engine.pictures.picture_input import PictureInput
from torch_armllm.engine.pictures.picture_steps import PictureSteps
from torch_armllm.engine.step import Scheduled, Step
from torch_armllm.kv_cache.shapes import Cache
from torch_armllm.plan.block_table import BlockTable
from torch_armllm.plan.shared_buffer import SharedBuffer
from torch_armllm.plan.step import StepInputs


class _Views:
    """Caches views of buffers by size: a running batch needs the same ones in every step."""

    def __init__(self, capacity: int, make: Callable[[int], tuple[Tensor, ...]]) -> None:
        self.capacity = capacity
        self._make = make
        self._views: dict[int, tuple[Tensor, ...]] = {}

    def __getitem__(self, size: int) -> tuple[Tensor, ...]:
        views = self._views.get(size)
        if views is None:
            views = self._views[size] = self._make(size)
        return views


class StepBuilder:
    """Writes the inputs of steps into buffers that it reuses: they are valid until the next step is built.

    Args:
        cache: KV cache that the steps read and write.
        block_size: positions per block.
        first_position: position id of a sequence's first token.
        states: states of recurrent layers; empty without.
        pictures: what pictures change; None: there are no pictures.

    Attributes:
        keeps_states: True if steps have slots for states.
    """

    def __init__(
        self,
        cache: Cache,
        block_size: int,
        first_position: int = 0,
        states: Sequence[Tensor] = (),
        pictures: PictureSteps | None = None,
    ) -> None:
        self.cache = cache
        self.block_size = block_size
        self.first_position = first_position
        self.states = list(states)
        self.keeps_states = bool(self.states)
        self._pictures = pictures
        self._numbers = None if pictures is None else pictures.numbers
        self._rows = None if pictures is None else pictures.rows
        self._table = BlockTable()
        self._reserve_tokens(512)
        self._reserve_sequences(64)

    def _reserve_tokens(self, tokens: int) -> None:
        ids, positions, slots, saves = (SharedBuffer("q", tokens) for _ in range(4))
        self._ids, self._positions, self._slots, self._saves = (
            buffer.items for buffer in (ids, positions, slots, saves)
        )
        self._saves[:] = array("q", [-1]) * tokens
        self._saved_rows: list[int] = []
        self._by_tokens = _Views(
            tokens, lambda n: (ids.view(1, n), positions.view(1, n), slots.view(n), saves.view(n))
        )
        self._decodes: dict[int, StepInputs] = {}
        if self._numbers is not None:
            columns = self._numbers.columns
            given = SharedBuffer("q", tokens * columns)
            self._given = given.items
            self._given_by_tokens = _Views(tokens, lambda n: (given.view(n, columns),))
        if self._rows is not None:
            self._rows.reserve(tokens)

    def _reserve_sequences(self, sequences: int) -> None:
        starts, lengths = (SharedBuffer("i", sequences + 1) for _ in range(2))
        state_slots = SharedBuffer("q", sequences)
        self._starts, self._lengths, self._state_slots = starts.items, lengths.items, state_slots.items
        self._by_sequences = _Views(
            sequences, lambda n: (starts.view(n + 1), lengths.view(n), state_slots.view(n))
        )
        self._decodes = {}

    def decode(self, step: Step) -> StepInputs:
        """Returns the inputs of a `Step.decode_only` step: the same object for the same number of sequences.

        After a model step the CPU caches hold weights only, so each Python object touched is a cache miss.
        This loop touches as few as possible.
        """
        scheduled = step.scheduled
        count = len(scheduled)
        inputs = self._decodes.get(count)
        if inputs is None:
            self._reserve(count, count)
        ids, positions, slots, lengths = self._ids, self._positions, self._slots, self._lengths
        table, size, first = self._table, self.block_size, self.first_position
        max_seq_len = 0
        for row, (sequence, start, _) in enumerate(scheduled):
            blocks = sequence.blocks
            ids[row] = sequence.token_ids[start]
            positions[row] = first + start
            slots[row] = blocks[start // size] * size + start % size
            lengths[row] = start + 1
            if table.written[row] != blocks:
                table.write(row, blocks)
            if start >= max_seq_len:
                max_seq_len = start + 1
        if self.keeps_states:
            self._write_state_slots(step)
        if self._numbers is not None:
            self._numbers.write(self._given, step)
        if self._rows is not None:
            self._rows.clear()
        if inputs is None or inputs.block_table is not table.view(count):
            inputs = self._decodes[count] = self._decode_inputs(count)
        inputs.max_seq_len = max_seq_len
        return inputs

    def _decode_inputs(self, count: int) -> StepInputs:
        starts = torch.arange(count + 1, dtype=torch.int32)
        ids, positions, slots, saves = self._by_tokens[count]
        _, lengths, _ = self._by_sequences[count]
        return StepInputs(
            input_ids=ids,
            position_ids=positions,
            slots=slots,
            block_table=self._table.view(count),
            query_start=starts,
            seq_lens=lengths,
            max_seq_len=0,
            cache=self.cache,
            states=self.states,
            state_slots=self._state_slots_of(count),
            save_slots=saves,
            numbers=self._numbers_of(count),
            rows=self._rows_of(count),
        )

    def _numbers_of(self, tokens: int) -> Tensor | None:
        return None if self._numbers is None else self._given_by_tokens[tokens][0]

    def _rows_of(self, tokens: int) -> Tensor | None:
        return None if self._rows is None else self._rows.view(tokens)

    def _write_state_slots(self, step: Step) -> None:
        """Writes the slots of sequences, and those of the states that the step saves."""
        slots = [s.sequence.state for s in step.scheduled if s.sequence.state is not None]
        self._state_slots[: len(slots)] = array("q", slots)
        for row in self._saved_rows:
            self._saves[row] = -1
        self._saved_rows.clear()
        if not step.saves_states:
            return
        at = 0
        for sequence, start, count in step.scheduled:
            for length, slot in sequence.saves.items():
                if start < length <= start + count:
                    row = at + length - start - 1
                    self._saves[row] = slot
                    self._saved_rows.append(row)
            at += count

    def _state_slots_of(self, count: int) -> Tensor | None:
        return self._by_sequences[count][2] if self.keeps_states else None

    def build(self, step: Step) -> tuple[StepInputs, list[int]]:
        """Returns the inputs of a step, which must not be empty, and the rows of its tokens that need logits.

        One loop writes everything, with the common case first, for the same reason as in `decode`.
        """
        scheduled = step.scheduled
        tokens = step.token_count
        assert tokens > 0
        self._reserve(tokens, len(scheduled))
        ids, positions, slots = self._ids, self._positions, self._slots
        starts, lengths, table_rows = self._starts, self._lengths, self._table.written
        size, first = self.block_size, self.first_position
        rows: list[int] = []
        at = max_seq_len = 0
        for number, s in enumerate(scheduled):
            sequence, start, count = s
            token_ids, blocks = sequence.token_ids, sequence.blocks
            end = start + count
            if count == 1 and end == len(token_ids):
                ids[at] = token_ids[start]
                positions[at] = first + start
                slots[at] = blocks[start // size] * size + start % size
                rows.append(at)
            else:
                self._write_many(at, s)
                rows.extend([position + at - start for position in s.logit_positions])
            if table_rows[number] != blocks:
                self._table.write(number, blocks)
                table_rows = self._table.written
            at += count
            starts[number + 1] = at
            lengths[number] = end
            if end > max_seq_len:
                max_seq_len = end
        input_ids, position_ids, slot_ids, saves = self._by_tokens[tokens]
        query_start, seq_lens, _ = self._by_sequences[len(scheduled)]
        table = self._table.view(len(scheduled))
        if self.keeps_states:
            self._write_state_slots(step)
        if self._pictures is not None and self._rows is not None:
            self._write_pictures(self._pictures.token, self._rows, step)
        if self._numbers is not None:
            self._numbers.write(self._given, step)
        step_inputs = StepInputs(
            input_ids=input_ids,
            position_ids=position_ids,
            slots=slot_ids,
            block_table=table,
            query_start=query_start,
            seq_lens=seq_lens,
            max_seq_len=max_seq_len,
            cache=self.cache,
            states=self.states,
            state_slots=self._state_slots_of(len(scheduled)),
            save_slots=saves,
            numbers=self._numbers_of(tokens),
            rows=self._rows_of(tokens),
        )
        return step_inputs, rows

    def _write_pictures(self, placeholder: int, rows: PictureInput, step: Step) -> None:
        """Writes the rows of picture tokens, and the id that they have in place of the placeholders'."""
        rows.clear()
        at = 0
        for sequence, start, count in step.scheduled:
            shown = sequence.request.pictures
            if shown is not None and start < sequence.prompt_length:
                found = shown.within(start, start + count)
                tokens = [at + position - start for position in shown.positions[found]]
                for token in tokens:
                    self._ids[token] = placeholder
                if tokens:
                    rows.write(tokens, shown.rows[found])
            at += count

    def _reserve(self, tokens: int, sequences: int) -> None:
        if tokens > self._by_tokens.capacity:
            self._reserve_tokens(2 * tokens)
        if sequences > self._by_sequences.capacity:
            self._reserve_sequences(2 * sequences)
        self._table.reserve_rows(sequences)

    def _write_many(self, at: int, s: Scheduled) -> None:
        sequence, start, end, size = s.sequence, s.start, s.end, self.block_size
        ids = sequence.token_ids[start:end]
        if len(ids) < s.count:
            ids = ids + sequence.draft[: s.count - len(ids)]
        slots = array("q")
        first = start // size
        for block in sequence.blocks[first : -(-end // size)]:
            slots.extend(range(block * size, (block + 1) * size))
        skipped = start - first * size
        after = at + s.count
        self._ids[at:after] = array("q", ids)
        self._positions[at:after] = array("q", range(self.first_position + start, self.first_position + end))
        self._slots[at:after] = slots[skipped : skipped + s.count]
