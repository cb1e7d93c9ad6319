"""Messages with the rows of pictures, as the ranks of a step read them."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_armllm.engine.execution import step_message
from torch_armllm.engine.execution.step_message import (
    ReceivedStep,
    StepReader,
    picture_messages,
)
from torch_armllm.engine.execution.step_message import (
    step_message as message_of,
)
from torch_armllm.engine.pictures.picture_input import PictureInput
from torch_armllm.engine.pictures.picture_steps import PictureSteps
from torch_armllm.engine.pictures.token_numbers import LaterTokens
from torch_armllm.engine.step import Step
from torch_armllm.plan.step import StepInputs

COLUMNS, DTYPE = 5, torch.bfloat16


def pictures(rows: PictureInput | None) -> PictureSteps:
    plan: Any = None
    return PictureSteps(plan, rows, 0, 0, LaterTokens())


def step_of(tokens: int, rows: Tensor) -> StepInputs:
    ids = torch.arange(tokens)[None]
    table = torch.zeros(1, 1, dtype=torch.int32)
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    numbers = torch.arange(tokens)[:, None] * 3
    return StepInputs(
        *(ids, ids + 1, ids[0] + 2, table, starts, starts[1:], tokens, ()), numbers=numbers, rows=rows
    )


def read(reader: StepReader, numbers: array[int], tensors: list[Tensor]) -> ReceivedStep | None:
    """Reads a message as if a mailbox had brought it."""
    parts = [
        torch.frombuffer(numbers, dtype=torch.uint8),
        *(t.reshape(-1).view(torch.uint8) for t in tensors),
    ]
    memory = torch.cat(parts)
    found = reader.read(memory.data_ptr())
    assert not isinstance(found, step_message.Signal)
    return found


@pytest.mark.parametrize("piece", [1, 20, 4 << 20])
def test_ranks_read_the_rows_of_every_step(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in one message and in several, of steps with and without pictures, small and large ones."""
    monkeypatch.setattr(step_message, "_PICTURE_BYTES", piece)
    sent = PictureInput(COLUMNS, DTYPE)
    sent.reserve(4096)
    reader = StepReader((), [], pictures(PictureInput(COLUMNS, DTYPE)))
    later = StepReader((), [], pictures(None))
    random = torch.Generator().manual_seed(0)
    for tokens, shown in ((9, [1, 2, 7]), (9, []), (2000, list(range(5, 1800))), (9, [0]), (1, []), (1, [0])):
        sent.clear()
        if shown:
            sent.write(shown, torch.randn(len(shown), COLUMNS - 1, generator=random).to(DTYPE))
        inputs = step_of(tokens, sent.view(tokens))
        messages = list(picture_messages(tokens, sent))
        assert len(messages) == -(-len(shown) // max(1, piece // (COLUMNS * 2)))
        for message in messages:
            assert read(reader, *message) is None and read(later, *message) is None
        message = message_of(Step(), inputs, None, False)
        found, other = read(reader, *message), read(later, *message)
        assert found is not None and other is not None and other.inputs.rows is None
        for each in (found, other):
            assert torch.equal(each.inputs.input_ids, inputs.input_ids)
            assert each.inputs.numbers is not None and inputs.numbers is not None
            assert torch.equal(each.inputs.numbers, inputs.numbers)
            assert torch.equal(each.inputs.seq_lens, inputs.seq_lens)
        assert found.inputs.rows is not None and torch.equal(found.inputs.rows, sent.view(tokens))
        assert found.inputs.rows.is_contiguous()
        for each in (reader, later):
            each.end_step()
