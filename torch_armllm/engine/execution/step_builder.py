"""Builds the input tensors of a step for `Plan.run`."""

from __future__ import annotations

from array import array

import torch

from torch_armllm.engine.execution.step_feature import NO_FEATURES, StepFeatures
from torch_armllm.engine.execution.views import Views
from torch_armllm.engine.scheduling.step import Scheduled, Step
from torch_armllm.kv_cache.shapes import Cache
from torch_armllm.plan.block_table import BlockTable
from torch_armllm.plan.shared_buffer import SharedBuffer
from torch_armllm.plan.step import StepInputs


class StepBuilder:
    """Writes the inputs of steps into buffers that it reuses: they are valid until the next step is built.

    Args:
        cache: KV cache that the steps read and write.
        block_size: positions per block.
        first_position: position id of a sequence's first token.
        features: of steps, beside tokens.
    """

    def __init__(
        self, cache: Cache, block_size: int, first_position: int = 0, features: StepFeatures = NO_FEATURES
    ) -> None:
        self.cache = cache
        self.block_size = block_size
        self.first_position = first_position
        self._features = features
        self._writes = [feature.write for feature in features]
        self._table = BlockTable()
        self._grow(512, 64)

    def _grow(self, tokens: int, sequences: int) -> None:
        """Takes larger buffers, which have room for so many tokens and sequences."""
        ids, positions, slots = (SharedBuffer("q", tokens) for _ in range(3))
        self._ids, self._positions, self._slots = ids.items, positions.items, slots.items
        self._by_tokens = Views(tokens, lambda n: (ids.view(1, n), positions.view(1, n), slots.view(n)))
        starts, lengths = (SharedBuffer("i", sequences + 1) for _ in range(2))
        self._starts, self._lengths = starts.items, lengths.items
        self._by_sequences = Views(sequences, lambda n: (starts.view(n + 1), lengths.view(n)))
        self._features.reserve(tokens, sequences)
        self._decodes: dict[int, StepInputs] = {}

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
        for write in self._writes:
            write(step, ids)
        if inputs is None or inputs.block_table is not table.view(count):
            inputs = self._decodes[count] = self._decode_inputs(count)
        inputs.max_seq_len = max_seq_len
        return inputs

    def _decode_inputs(self, count: int) -> StepInputs:
        starts = torch.arange(count + 1, dtype=torch.int32)
        ids, positions, slots = self._by_tokens[count]
        return StepInputs(
            input_ids=ids,
            position_ids=positions,
            slots=slots,
            block_table=self._table.view(count),
            query_start=starts,
            seq_lens=self._by_sequences[count][1],
            max_seq_len=0,
            cache=self.cache,
            **self._features.inputs(count, count),
        )

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
        input_ids, position_ids, slot_ids = self._by_tokens[tokens]
        query_start, seq_lens = self._by_sequences[len(scheduled)]
        table = self._table.view(len(scheduled))
        for write in self._writes:
            write(step, ids)
        step_inputs = StepInputs(
            input_ids=input_ids,
            position_ids=position_ids,
            slots=slot_ids,
            block_table=table,
            query_start=query_start,
            seq_lens=seq_lens,
            max_seq_len=max_seq_len,
            cache=self.cache,
            **self._features.inputs(tokens, len(scheduled)),
        )
        return step_inputs, rows

    def _reserve(self, tokens: int, sequences: int) -> None:
        most_tokens, most_sequences = self._by_tokens.capacity, self._by_sequences.capacity
        if tokens > most_tokens or sequences > most_sequences:
            self._grow(
                2 * tokens if tokens > most_tokens else most_tokens,
                2 * sequences if sequences > most_sequences else most_sequences,
            )
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
