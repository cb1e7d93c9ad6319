"""Messages without a step, as a rank follows them."""

from __future__ import annotations

from array import array

import pytest
import torch

from tests.support.models import tiny
from torch_armllm import Recipe, patch
from torch_armllm.engine.execution import factor_message as factor_messages
from torch_armllm.engine.execution.executor_sizes import ExecutorSizes
from torch_armllm.engine.execution.factor_message import factor_pieces
from torch_armllm.engine.execution.message import ComputeLogits, Message, ReleaseCache, Stop
from torch_armllm.engine.execution.message_codec import encode
from torch_armllm.engine.execution.rank_follower import follow
from torch_armllm.engine.execution.step_executor import StepExecutor
from torch_armllm.engine.execution.step_features import step_features
from torch_armllm.lora.expert_slots import ExpertSlots
from torch_armllm.lora.read_slots import slots_read_by
from torch_armllm.lora.slots import AdapterSlots, LoraSlots
from torch_armllm.patching.patched_model import servable_model
from torch_armllm.plan.native import NativePlan


class Messages:
    """Messages that a rank receives one after another."""

    def __init__(self, *messages: Message) -> None:
        self._messages = [encode(each) + array("q", bytes_of(*each.tensors)) for each in messages]
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
    return StepExecutor(servable, ExecutorSizes(64))


def test_a_rank_gives_its_cache_back_and_ends(executor: StepExecutor) -> None:
    for tensor in executor.caches.tensors:
        tensor.view(-1).fill_(1)
    messages = Messages(ReleaseCache(), Stop(), ReleaseCache())
    follow(1, messages, executor)
    assert messages.read == 2
    for tensor in executor.caches.tensors:
        assert tensor.count_nonzero() < tensor.numel() / 4  # parts of pages at both ends stay


def test_a_rank_without_stages_has_no_step_under_way(executor: StepExecutor) -> None:
    with pytest.raises(RuntimeError, match="no step is under way"):
        follow(1, Messages(ComputeLogits()), executor)


def test_a_rank_writes_an_adapter_that_comes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factor_messages, "_MOST_BYTES", 1000)
    model = tiny("qwen3_moe")
    patch(model, Recipe(importance=False), adapter_slots=AdapterSlots(2, 4, 8))
    servable = servable_model(model)
    assert servable is not None and isinstance(servable.plan, NativePlan)
    slots = slots_read_by(model, servable.plan.program.constants)
    assert slots is not None
    experts = "model.layers.1.mlp.experts"
    down, layer = slots.layers[experts], slots.layers["model.layers.0.self_attn.q_proj"]
    assert isinstance(down, ExpertSlots) and isinstance(layer, LoraSlots)
    outer = torch.randn(down.count, 3, down.inner), torch.randn(down.count, 1, 3, down.hidden)
    factors = {
        "model.layers.0.self_attn.q_proj": layer.prepare(
            torch.randn(3, layer.in_features), torch.randn(3, layer.out_features)
        ),
        experts: down.prepare(None, outer),
    }
    layer.ranks[:], down.outer_ranks[:] = 4, 4
    pieces = list(factor_pieces(1, list(slots.layers), factors))
    assert len(pieces) > 7
    executor = StepExecutor(servable, ExecutorSizes(4), step_features(slots=slots))
    follow(1, Messages(*pieces, Stop()), executor)
    for name, given in factors.items():
        slots.write(0, name, given)
    for one, rank in ((layer.a, 3), (down.outer_a.transpose(1, 2), 3)):
        assert torch.equal(one[0, :rank], one[1, :rank]) and one[0, :rank].count_nonzero()
    assert torch.equal(layer.b[0, :, :3], layer.b[1, :, :3])
    assert torch.equal(down.outer_b[0, ..., :3, :], down.outer_b[1, ..., :3, :])
    assert layer.ranks.tolist() == down.outer_ranks.tolist() == [3, 3] and not down.inner_ranks.any()
    others = (each for each in slots.layers.values() if isinstance(each, LoraSlots) and each is not layer)
    assert not any(each.ranks.any() for each in others)


def bytes_of(*tensors: torch.Tensor) -> bytes:
    """Returns the bytes of tensors in whole words."""
    content = b"".join(bytes(each.tolist()) for each in tensors)
    return content + bytes(-len(content) % 8)
