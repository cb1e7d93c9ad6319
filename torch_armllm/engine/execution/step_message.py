"""A step as a message between ranks."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from torch_armllm.engine.execution.message import Message
from torch_armllm.engine.execution.step_executor import StepExecutor
from torch_armllm.engine.execution.step_feature import StepFeatures
from torch_armllm.engine.scheduling.step import Step
from torch_armllm.plan.step import StepInputs

_KEPT = 16
"""Sizes of steps whose memory is kept, so that a plan can replay them."""
_FIXED = 10
"""Numbers of every step."""
_Pairs = Sequence[tuple[int, int]]


class StepMessage(NamedTuple):
    """A step.

    Attributes:
        tokens: their number.
        sequences: their number.
        table_width: columns of the block table.
        max_seq_len: see `StepInputs`.
        best: asks for the most probable tokens.
        decode_only: see `Step`.
        rows: tokens that need logits; None: all.
        swaps_out: see `Step`; so are the next two.
        swaps_in: pairs of blocks.
        copies: likewise.
        features: numbers of each feature.
        tensors: of the inputs; of a message that was read, the bytes of all.
    """

    tokens: int
    sequences: int
    table_width: int
    max_seq_len: int
    best: bool
    decode_only: bool
    rows: Sequence[int] | None
    swaps_out: _Pairs
    swaps_in: _Pairs
    copies: _Pairs
    features: Sequence[Sequence[int]]
    tensors: Sequence[Tensor]

    @property
    def numbers(self) -> Sequence[int]:
        """See `Message.numbers`."""
        numbers = [*self[:6], -1 if self.rows is None else len(self.rows)]
        lists = self.swaps_out, self.swaps_in, self.copies
        numbers += map(len, lists)
        numbers += self.rows or ()
        for pairs in lists:
            for pair in pairs:
                numbers += pair
        for each in self.features:
            numbers.append(len(each))
            numbers += each
        return numbers

    @classmethod
    def of(cls, numbers: list[int], content: Tensor) -> Self:
        """See `Message.of`."""
        tokens, sequences, width, longest, best, decode_only, count, *counts = numbers[:_FIXED]
        at = _FIXED + max(0, count)
        rows = None if count < 0 else numbers[_FIXED:at]
        lists: list[_Pairs] = []
        for pairs in counts:
            flat = iter(numbers[at : at + 2 * pairs])
            lists.append(list(zip(flat, flat, strict=True)))
            at += 2 * pairs
        features = []
        while at < len(numbers):
            after = at + 1 + numbers[at]
            features.append(numbers[at + 1 : after])
            at = after
        flags = bool(best), bool(decode_only)
        out, back, copies = lists
        return cls(tokens, sequences, width, longest, *flags, rows, out, back, copies, features, [content])


def step_messages(
    step: Step, inputs: StepInputs, rows: Sequence[int] | None, best: bool, features: StepFeatures
) -> Iterator[Message]:
    """Yields the messages of a step, that of the step itself last.

    Args:
        step: its copies are sent.
        inputs: its tokens.
        rows: tokens that need logits; None: all.
        best: asks for the most probable tokens.
        features: which have written what the step has.
    """
    tokens = inputs.tokens
    for feature in features:
        yield from feature.messages(tokens)
    sequences, width = inputs.block_table.shape
    yield StepMessage(
        tokens,
        sequences,
        width,
        inputs.max_seq_len,
        best,
        step.decode_only,
        rows,
        step.swaps_out,
        step.swaps_in,
        step.copies,
        [feature.numbers() for feature in features],
        _tensors(inputs, features),
    )


def _tensors(inputs: StepInputs, features: StepFeatures) -> list[Tensor]:
    """Returns the tensors of a message: those of int64 first, so that all are aligned."""
    further = features.tensors(inputs.tokens, len(inputs.seq_lens))
    firsts = inputs.input_ids, inputs.position_ids, inputs.slots
    return [*firsts, *further, inputs.block_table, inputs.query_start, inputs.seq_lens]


class StepReader:
    """Takes steps that messages bring through a process, in memory that steps of equal sizes share.

    Args:
        executor: of the process.
    """

    def __init__(self, executor: StepExecutor) -> None:
        self._caches, self._course = executor.caches, executor.course
        self._features = executor.features
        self._kept: dict[tuple[int, int, int], StepInputs] = {}
        self._reserve(512, 64)

    def compute(self, message: StepMessage) -> None:
        """Computes a step."""
        self._caches.copy_blocks(message.swaps_out, message.swaps_in, message.copies)
        self._course.follow(self.read(message), message.rows, message.best)

    def read(self, message: StepMessage) -> StepInputs:
        """Returns the inputs of a step."""
        inputs = self._inputs(message)
        inputs.max_seq_len = message.max_seq_len
        (content,) = message.tensors
        at = content.data_ptr()
        for tensor in _tensors(inputs, self._features):
            ctypes.memmove(tensor.data_ptr(), at, tensor.nbytes)
            at += tensor.nbytes
        for feature, numbers in zip(self._features, message.features, strict=True):
            feature.read(list(numbers))
        # a plan replays what it did for the same object, which other queries forbid
        return inputs if message.decode_only else replace(inputs)

    def _reserve(self, tokens: int, sequences: int) -> None:
        self._tokens, self._sequences = tokens, sequences
        self._features.reserve(tokens, sequences)
        self._kept.clear()  # those have views of other memory

    def _inputs(self, message: StepMessage) -> StepInputs:
        tokens, sequences, width = message.tokens, message.sequences, message.table_width
        if tokens > self._tokens or sequences > self._sequences:
            self._reserve(max(self._tokens, 2 * tokens), max(self._sequences, 2 * sequences))
        key = tokens, sequences, width
        inputs = self._kept.pop(key, None)
        if inputs is None:
            ids, positions = (torch.empty(1, tokens, dtype=torch.int64) for _ in range(2))
            starts, lengths = (torch.empty(sequences + n, dtype=torch.int32) for n in (1, 0))
            inputs = StepInputs(
                input_ids=ids,
                position_ids=positions,
                slots=torch.empty(tokens, dtype=torch.int64),
                block_table=torch.empty(sequences, width, dtype=torch.int32),
                query_start=starts,
                seq_lens=lengths,
                max_seq_len=0,
                cache=self._caches.cache,
                **self._features.inputs(tokens, sequences),
            )
            if len(self._kept) == _KEPT:
                del self._kept[next(iter(self._kept))]  # the least recently used
        self._kept[key] = inputs
        return inputs
