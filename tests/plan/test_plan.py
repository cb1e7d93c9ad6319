"""Native plans reject inputs that would cause reads or writes out of bounds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.fuzz.ops.recorded import VOCABULARY, head
from tests.support.graphs import export, ops
from tests.support.models import token_ids
from tests.support.patched_models import patched
from torch_armllm.kv_cache.block_pool import BlockPool
from torch_armllm.kv_cache.sequence_blocks import SequenceBlocks
from torch_armllm.plan.native import NativePlan
from torch_armllm.plan.step import StepInputs

IDS, POSITIONS, SLOTS, TABLE, STARTS, LENGTHS, KEYS, VALUES = range(8)
TOKENS = 6


def inputs_of(family: str = "llama", blocks: int = 3) -> list[Tensor]:
    """Returns valid inputs of a step of six tokens."""
    forward = patched(family).base_model.forward
    pool = BlockPool(forward.shape, blocks)
    positions = torch.arange(TOKENS)[None]
    step = StepInputs.pack(pool, [SequenceBlocks(pool)], [TOKENS], token_ids(1, TOKENS), positions)
    return [
        *(step.input_ids, step.position_ids, step.slots, step.block_table),
        *(step.query_start, step.seq_lens, *step.caches),
    ]


def run(inputs: list[Tensor], tokens: int = TOKENS, family: str = "llama") -> Tensor:
    """Runs the native plan of a tiny model."""
    plan = patched(family).base_model.forward.plan
    assert isinstance(plan, NativePlan)
    result: Tensor = plan._run(plan._handle, inputs, tokens)[0]
    return result


def test_valid_inputs_run() -> None:
    assert run(inputs_of()).shape == (TOKENS, 64)
    assert run(inputs_of(), 0).shape == (0, 64)


@pytest.mark.parametrize("token_id", [-1, 97, 10**9])
def test_token_outside_vocabulary_raises(token_id: int) -> None:
    inputs = inputs_of()
    inputs[IDS][0, 4] = token_id
    with pytest.raises(RuntimeError, match=f"token 4 has id {token_id}, but the vocabulary is 0 to 96"):
        run(inputs)


def test_missing_or_short_inputs_raise() -> None:
    inputs = inputs_of()
    inputs[IDS] = inputs[IDS][:, :5]
    with pytest.raises(RuntimeError, match="input 0 has 5 elements for 6 tokens"):
        run(inputs)
    with pytest.raises(RuntimeError, match="it reads input 1, but the number of inputs is 1"):
        run(inputs_of()[:1])


def test_inputs_of_another_dtype_raise() -> None:
    inputs = inputs_of()
    inputs[IDS] = inputs[IDS].int()
    with pytest.raises(RuntimeError, match="input 0 has another dtype than the program reads"):
        run(inputs)


@pytest.mark.parametrize("tokens", [-1, 2**31, 2**62])
def test_tokens_without_inputs_raise(tokens: int) -> None:
    with pytest.raises(RuntimeError, match=f"cannot run {tokens} tokens"):
        run(inputs_of(), tokens)


def first_is(number: int, value: int) -> Callable[[list[Tensor]], None]:
    """Returns a function that changes the first element of an input."""

    def change(inputs: list[Tensor]) -> None:
        inputs[number].view(-1)[0] = value

    return change


def replaced(number: int, change: Callable[[Tensor], Tensor]) -> Callable[[list[Tensor]], None]:
    """Returns a function that replaces an input."""

    def replace(inputs: list[Tensor]) -> None:
        inputs[number] = change(inputs[number])

    return replace


WRONG: dict[str, tuple[Callable[[list[Tensor]], None], str]] = {
    "slot": (first_is(SLOTS, 96), "slot 96 of token 0 is past the cache of 96 positions"),
    "slot-huge": (first_is(SLOTS, 2**62), "past the cache"),
    "slots-short": (replaced(SLOTS, lambda t: t[:5]), "input 2 has 5 elements for 6 tokens"),
    "block": (first_is(TABLE, 3), "block_table names block 3 for sequence 0"),
    "block-below": (first_is(TABLE, -1), "block_table names block -1"),
    "table-narrow": (replaced(TABLE, lambda t: t[:, :0]), "block_table has columns for 0"),
    "table-dims": (replaced(TABLE, lambda t: t[0]), "the block table, must be contiguous int32 with 2 dim"),
    "table-dtype": (replaced(TABLE, lambda t: t.long()), "the block table, must be contiguous int32"),
    "starts": (
        first_is(STARTS, 1),
        "query_start must run from 0 to the number of tokens, 6, not from 1 to 6",
    ),
    "starts-short": (replaced(STARTS, lambda t: t[:1]), "need 2 starts"),
    "lengths": (first_is(LENGTHS, 5), "sequence 0 has 6 new tokens, but seq_lens says 5"),
    "lengths-long": (first_is(LENGTHS, 2**31 - 1), "block_table has columns for 1"),
    "layers": (replaced(KEYS, lambda t: t[:1]), "it uses layer 1 of input 6"),
    "values-layers": (replaced(VALUES, lambda t: t[:1]), "it uses layer 1 of input 7"),
    "blocks": (replaced(VALUES, lambda t: t[:, :2]), "does not fit k_cache"),
    "block-size": (replaced(KEYS, lambda t: t[..., :8].contiguous()), "block size 8 is not one of 16"),
    "head-size": (replaced(KEYS, lambda t: t[:, :, :, :8].contiguous()), "head size 16 does not fit k_cache"),
    "strided": (replaced(KEYS, lambda t: t.transpose(3, 4)), "does not fit"),
    "cache-dtype": (replaced(KEYS, lambda t: t.half()), "must have the same dtype"),
    "cache-double": (replaced(KEYS, lambda t: t.double()), "must have the dtype float32"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_caches_and_indices_raise(name: str) -> None:
    """They were used as they were: a slot past the cache wrote anywhere."""
    change, message = WRONG[name]
    inputs = inputs_of()
    change(inputs)
    with pytest.raises(RuntimeError, match=message):
        run(inputs)


def test_cache_of_another_model_raises() -> None:
    inputs = inputs_of()
    keys, values = inputs[KEYS], inputs[VALUES]
    inputs[VALUES] = torch.cat((values, values), -1)
    with pytest.raises(RuntimeError, match="made for another cache than one with 2 heads of size 16"):
        run(inputs)
    inputs[KEYS], inputs[VALUES] = (torch.cat((t, t, t), 2) for t in (keys, values))
    with pytest.raises(RuntimeError, match="made for another cache than one with 6 heads"):
        run(inputs)


def test_negative_slots_and_unused_blocks_run() -> None:
    inputs = inputs_of()
    inputs[SLOTS].fill_(-1)
    inputs[TABLE] = torch.cat((inputs[TABLE], torch.full((1, 3), -7, dtype=torch.int32)), 1)
    run(inputs)


@pytest.mark.parametrize(("number", "value"), [(SLOTS, 96), (TABLE, 3), (LENGTHS, 5), (STARTS, 1), (IDS, 97)])
def test_replay_of_wrong_values_is_refused(number: int, value: int) -> None:
    """A replay reads the values that the step's tensors hold by then."""
    body = patched("llama").base_model.forward.plan
    following = NativePlan(head(64, torch.float32).program)
    inputs = inputs_of()
    results = [torch.empty(TOKENS, VOCABULARY), torch.empty(TOKENS, 1, dtype=torch.int64)]
    binding = body._run_then(body._handle, following._handle, inputs, results, TOKENS)
    replay = body.replay(following)
    assert replay(binding, None)
    first, before = inputs[number].view(-1), int(inputs[number].view(-1)[0])
    first[0] = value
    assert not replay(binding, None)
    first[0] = before
    assert replay(binding, None)


def test_second_plan_with_a_cache_is_refused() -> None:
    """Its slots would be checked before the first plan writes them."""
    body = patched("llama").base_model.forward.plan
    other = patched("qwen3").base_model.forward.plan
    with pytest.raises(RuntimeError, match="the second plan must not use a cache"):
        body._run_then(body._handle, other._handle, inputs_of(), [torch.empty(TOKENS, 64)], TOKENS)


def test_a_plan_freed_while_a_graph_is_traced_is_not_in_the_graph() -> None:
    """The garbage collector may run at any time; an op that it calls would be recorded."""
    plans = [NativePlan(head(64, torch.float32).program)]

    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            plans.clear()
            return x + 1

    assert ops(export(Module(), torch.ones(1, 4))) == ["add"]
    assert not plans
