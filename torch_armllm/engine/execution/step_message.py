"""A step as a message between ranks: numbers, then the tensors of its inputs."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from torch_armllm.engine.execution.adapter_rows import AdapterRuns, Run, adapter_runs
from torch_armllm.engine.execution.factor_message import FactorPiece
from torch_armllm.engine.execution.row_order import RowAct, RowOrder
from torch_armllm.engine.pictures.picture_input import PictureInput
from torch_armllm.engine.pictures.picture_steps import PictureSteps
from torch_armllm.engine.step import StateMove, Step
from torch_armllm.kv_cache.shapes import Cache
from torch_armllm.plan.step import NO_SAVES, StepInputs

STEP = -1
"""Kind of a message that brings a step."""
FACTORS = -2
"""Kind of a message that brings a part of an adapter."""
ROWS = -3
"""Kind of a message that brings a `RowOrder`."""
PICTURES = -4
"""Kind of a message that brings rows of pictures, of the step that follows; others are signals."""
_PICTURE_BYTES = 4 << 20
"""Most bytes of rows of such a message: a step's pictures may have many, which the slots of a mailbox would
keep."""


class Signal(IntEnum):
    """A message without a step."""

    STOP = 0
    """Ends the rank."""
    LOGITS = 1
    """Lets a rank of a pipeline's first stage compute its logits of the oldest step under way."""
    RELEASE = 2
    """Lets a rank give the memory of its KV cache back to the system."""


_MOVES = ("copy", "swap_out", "swap_in")
_KEPT = 16
"""Sizes of steps whose memory is kept, so that a plan can replay them."""


class _Header(NamedTuple):
    """Numbers that every message begins with."""

    kind: int
    tokens: int = 0
    sequences: int = 0
    table_width: int = 0
    max_seq_len: int = 0
    rows: int = -1
    best: int = 0
    has_states: int = 0
    decode_only: int = 0
    state_moves: int = 0
    swaps_out: int = 0
    swaps_in: int = 0
    copies: int = 0
    adapters: int = 0
    adapters_of_logits: int = 0


class Copies(NamedTuple):
    """Copies before a step; see `Step`."""

    state_moves: list[StateMove]
    swaps_out: list[tuple[int, int]]
    swaps_in: list[tuple[int, int]]
    copies: list[tuple[int, int]]


def signal_message(signal: Signal) -> array[int]:
    """Returns the numbers of a message without a step."""
    return array("q", _Header(signal))


def row_message(order: RowOrder) -> array[int]:
    """Returns the numbers of a message about bytes of caches."""
    return array("q", (*_Header(ROWS), *order))


def factor_message(piece: FactorPiece) -> tuple[array[int], list[Tensor]]:
    """Returns the numbers and the tensors of a message with a part of an adapter."""
    return array("q", _Header(FACTORS)) + piece.numbers, [piece.content]


def step_message(
    step: Step, inputs: StepInputs, rows: Sequence[int] | None, best: bool
) -> tuple[array[int], list[Tensor]]:
    """Returns the numbers and the tensors of a step's message.

    Args:
        step: its copies are sent.
        inputs: its tokens.
        rows: tokens that need logits; None: all.
        best: asks for the most probable tokens.
    """
    sequences, width = inputs.block_table.shape
    lists = step.swaps_out, step.swaps_in, step.copies
    runs = adapter_runs(step)
    header = _Header(
        STEP,
        inputs.tokens,
        sequences,
        width,
        inputs.max_seq_len,
        -1 if rows is None else len(rows),
        best,
        inputs.state_slots is not None,
        step.decode_only,
        len(step.state_moves),
        *map(len, lists),
        *map(len, runs),
    )
    numbers = array("q", header)
    numbers.extend(rows or ())
    for move in step.state_moves:
        numbers.extend([_MOVES.index(move.kind), move.source, move.target])
    for pairs in lists:
        for pair in pairs:
            numbers.extend(pair)
    for each in runs:
        for run in each:
            numbers.extend(run)
    return numbers, _tensors(inputs)


def picture_messages(tokens: int, shown: PictureInput) -> Iterator[tuple[array[int], list[Tensor]]]:
    """Yields the numbers and the tensors of messages with the rows of a step's pictures.

    Args:
        tokens: of the step.
        shown: its rows.
    """
    count = max(1, _PICTURE_BYTES // (shown.columns * shown.dtype.itemsize))
    for first in range(0, len(shown.written), count):
        part = shown.written[first : first + count]
        numbers = array("q", _Header(PICTURES, tokens, rows=len(part)))
        numbers.extend(part)
        yield numbers, [shown.of(part)]


def _tensors(inputs: StepInputs) -> list[Tensor]:
    """Returns the tensors of a message: those of int64 first, so that all are aligned."""
    tensors = [inputs.input_ids, inputs.position_ids, inputs.slots]
    if inputs.state_slots is not None:
        tensors += [inputs.state_slots, inputs.save_slots]
    if inputs.numbers is not None:
        tensors.append(inputs.numbers)
    return [*tensors, inputs.block_table, inputs.query_start, inputs.seq_lens]


class ReceivedStep(NamedTuple):
    """A step, as a message says it."""

    copies: Copies
    inputs: StepInputs
    rows: list[int] | None
    best: bool
    adapters: AdapterRuns


class StepReader:
    """Reads messages into memory that steps of equal sizes share.

    Args:
        cache: this rank's KV cache.
        states: this rank's states of recurrent layers.
        pictures: what pictures change in this rank's steps; None: there are no pictures.
    """

    def __init__(self, cache: Cache, states: Sequence[Tensor], pictures: PictureSteps | None = None) -> None:
        self._cache, self._states = cache, list(states)
        self._shown = None if pictures is None else pictures.rows
        self._columns = 0 if pictures is None or pictures.numbers is None else pictures.numbers.columns
        self._kept: dict[tuple[int, int, int], StepInputs] = {}

    def read(self, address: int) -> ReceivedStep | FactorPiece | RowOrder | Signal | None:
        """Returns the step of the message at an address, or what the message says without one.

        None: it brings rows of pictures, of the next step.
        """
        numbers = _Numbers(address)
        header = _Header(*numbers.take(len(_Header._fields)))
        if header.kind == FACTORS:
            return numbers.piece()
        if header.kind == ROWS:
            act, number = numbers.take(2)
            return RowOrder(RowAct(act), number)
        if header.kind == PICTURES:
            if self._shown is not None:  # other stages do not embed tokens
                self._read_pictures(header, numbers, self._shown)
            return None
        if header.kind != STEP:
            return Signal(header.kind)
        rows = None if header.rows < 0 else numbers.take(header.rows)
        moves = [
            StateMove(_MOVES[kind], source, target)  # type: ignore[arg-type]
            for kind, source, target in (numbers.take(3) for _ in range(header.state_moves))
        ]
        pairs = [numbers.pairs(count) for count in (header.swaps_out, header.swaps_in, header.copies)]
        counts = header.adapters, header.adapters_of_logits
        runs = AdapterRuns(*([Run(*numbers.take(3)) for _ in range(count)] for count in counts))
        inputs = self._inputs(header)
        inputs.max_seq_len = header.max_seq_len
        at = numbers.at
        for tensor in _tensors(inputs):
            ctypes.memmove(tensor.data_ptr(), at, tensor.nbytes)
            at += tensor.nbytes
        if not header.decode_only:
            inputs = replace(
                inputs
            )  # a plan replays what it did for the same object, which other queries forbid
        return ReceivedStep(Copies(moves, *pairs), inputs, rows, bool(header.best), runs)

    def end_step(self) -> None:
        """Forgets the pictures of a step, which has been computed."""
        if self._shown is not None:
            self._shown.clear()

    def _read_pictures(self, header: _Header, numbers: _Numbers, shown: PictureInput) -> None:
        self._reserve(header.tokens, shown)
        tokens = numbers.take(header.rows)
        rows = torch.empty(len(tokens), shown.columns - 1, dtype=shown.dtype)
        ctypes.memmove(rows.data_ptr(), numbers.at, rows.nbytes)
        shown.write(tokens, rows)

    def _reserve(self, tokens: int, shown: PictureInput) -> None:
        if tokens > shown.capacity:
            shown.reserve(max(512, 2 * tokens))
            self._kept.clear()  # those have views of other memory

    def _inputs(self, header: _Header) -> StepInputs:
        if self._shown is not None:
            self._reserve(header.tokens, self._shown)
        key = tokens, sequences, width = header.tokens, header.sequences, header.table_width
        inputs = self._kept.pop(key, None)
        if inputs is None:
            ids, positions = (torch.empty(1, tokens, dtype=torch.int64) for _ in range(2))
            slots, saves = (torch.empty(tokens, dtype=torch.int64) for _ in range(2))
            table = torch.empty(sequences, width, dtype=torch.int32)
            starts, lengths = (torch.empty(sequences + n, dtype=torch.int32) for n in (1, 0))
            state_slots = torch.empty(sequences, dtype=torch.int64) if header.has_states else None
            inputs = StepInputs(
                input_ids=ids,
                position_ids=positions,
                slots=slots,
                block_table=table,
                query_start=starts,
                seq_lens=lengths,
                max_seq_len=0,
                cache=self._cache,
                states=self._states,
                state_slots=state_slots,
                save_slots=saves if header.has_states else NO_SAVES,
                numbers=torch.empty(tokens, self._columns, dtype=torch.int64) if self._columns else None,
                rows=None if self._shown is None else self._shown.view(tokens),
            )
            if len(self._kept) == _KEPT:
                del self._kept[next(iter(self._kept))]  # the least recently used
        self._kept[key] = inputs
        return inputs


class _Numbers:
    """Reads int64 numbers in order from an address on."""

    def __init__(self, address: int) -> None:
        self.at = address

    def take(self, count: int) -> list[int]:
        found = list((ctypes.c_int64 * count).from_address(self.at))
        self.at += 8 * count
        return found

    def pairs(self, count: int) -> list[tuple[int, int]]:
        return [(first, second) for first, second in (self.take(2) for _ in range(count))]

    def piece(self) -> FactorPiece:
        slot, layer, places, place, dtype, first, size, dims = self.take(8)
        shape = tuple(self.take(dims))
        content = torch.empty(size, dtype=torch.uint8)
        ctypes.memmove(content.data_ptr(), self.at, size)
        return FactorPiece(slot, layer, places, place, dtype, first, shape, content)
