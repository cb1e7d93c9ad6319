"""Messages with the rows of pictures, as the ranks of a step read them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_armllm.engine.execution.message import Message
from torch_armllm.engine.execution.message_codec import decode, encode
from torch_armllm.engine.execution.step_feature import StepFeatures
from torch_armllm.engine.execution.step_message import StepMessage, StepReader, step_messages
from torch_armllm.engine.images import image_message
from torch_armllm.engine.images.image_input import PictureInput
from torch_armllm.engine.images.image_message import PictureMessage
from torch_armllm.engine.images.image_steps import PictureSteps
from torch_armllm.engine.images.token_numbers import LaterTokens
from torch_armllm.engine.scheduling.step import Step
from torch_armllm.plan.step import StepInputs

COLUMNS, DTYPE = 5, torch.bfloat16


class Rank:
    """A process that reads steps, and computes nothing."""

    def __init__(self, rows: PictureInput | None) -> None:
        self.features = StepFeatures([pictures(rows)])
        executor: Any = SimpleNamespace(caches=SimpleNamespace(cache=()), course=None, features=self.features)
        self._reader = StepReader(executor)

    def read(self, message: Message) -> StepInputs | None:
        """Reads a message as if a mailbox had brought it; returns the inputs of a step."""
        parts = [torch.frombuffer(encode(message), dtype=torch.uint8)]
        memory = torch.cat(parts + [t.reshape(-1).view(torch.uint8) for t in message.tensors])
        found = decode(memory.data_ptr())
        if isinstance(found, StepMessage):
            return self._reader.read(found)
        self.features.acts[type(found)](found)
        return None


def pictures(rows: PictureInput | None) -> PictureSteps:
    plan: Any = None
    return PictureSteps(plan, rows, 0, 0, LaterTokens())


def step_of(tokens: int) -> StepInputs:
    ids = torch.arange(tokens)[None]
    table = torch.zeros(1, 1, dtype=torch.int32)
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    return StepInputs(ids, ids + 1, ids[0] + 2, table, starts, starts[1:], tokens, ())


@pytest.mark.parametrize("piece", [1, 20, 4 << 20])
def test_ranks_read_the_rows_of_every_step(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in one message and in several, of steps with and without pictures, small and large ones."""
    monkeypatch.setattr(image_message, "_MOST_BYTES", piece)
    sent = PictureInput(COLUMNS, DTYPE)
    features = StepFeatures([pictures(sent)])
    features.reserve(4096, 1)
    first, later = Rank(PictureInput(COLUMNS, DTYPE)), Rank(None)
    random = torch.Generator().manual_seed(0)
    for tokens, shown in ((9, [1, 2, 7]), (9, []), (2000, list(range(5, 1800))), (9, [0]), (1, []), (1, [0])):
        sent.clear()
        if shown:
            sent.write(shown, torch.randn(len(shown), COLUMNS - 1, generator=random).to(DTYPE))
        inputs = step_of(tokens)
        (numbers,) = features.tensors(tokens, 1)
        numbers.copy_(torch.arange(tokens)[:, None] * 3)
        *messages, step = step_messages(Step(), inputs, None, False, features)
        assert len(messages) == -(-len(shown) // max(1, piece // (COLUMNS * 2)))
        for message in messages:
            assert isinstance(message, PictureMessage)
            assert first.read(message) is None and later.read(message) is None
        found, other = first.read(step), later.read(step)
        assert found is not None and other is not None and other.rows is None
        for each in (found, other):
            assert torch.equal(each.input_ids, inputs.input_ids)
            assert each.numbers is not None and torch.equal(each.numbers, numbers)
            assert torch.equal(each.seq_lens, inputs.seq_lens)
        assert_rows(found.rows, sent.view(tokens))


def assert_rows(found: Tensor | None, expected: Tensor) -> None:
    assert found is not None and torch.equal(found, expected) and found.is_contiguous()
