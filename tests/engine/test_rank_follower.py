"""Messages without a step, as a rank follows them."""

from __future__ import annotations

from array import array

import pytest

from tests.support.models import tiny
from torch_armllm import patch
from torch_armllm.engine.execution.rank_follower import follow
from torch_armllm.engine.execution.step_executor import StepExecutor
from torch_armllm.engine.execution.step_message import Signal, signal_message
from torch_armllm.patching.patched_model import servable_model


class Messages:
    """Messages that a rank receives one after another."""

    def __init__(self, *messages: array[int]) -> None:
        self._messages = messages
        self.read = 0

    def receive(self) -> int:
        """Returns the address of the next message."""
        self.read += 1
        return self._messages[self.read - 1].buffer_info()[0]

    def done(self, rank: int) -> None:
        """Does nothing: messages stay."""


@pytest.fixture(scope="module")
def executor() -> StepExecutor:
    model = tiny("llama")
    patch(model)
    servable = servable_model(model)
    assert servable is not None
    return StepExecutor(servable, num_blocks=64)


def test_a_rank_gives_its_cache_back_and_ends(executor: StepExecutor) -> None:
    for tensor in executor.cache_tensors:
        tensor.view(-1).fill_(1)
    messages = Messages(*map(signal_message, (Signal.RELEASE, Signal.STOP, Signal.RELEASE)))
    follow(1, messages, executor)
    assert messages.read == 2
    for tensor in executor.cache_tensors:
        assert tensor.count_nonzero() < tensor.numel() / 4  # parts of pages at both ends stay


def test_a_rank_without_stages_has_no_step_under_way(executor: StepExecutor) -> None:
    with pytest.raises(RuntimeError, match="no step is under way"):
        follow(1, Messages(signal_message(Signal.LOGITS)), executor)
