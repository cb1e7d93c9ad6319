"""State slots of recurrent layers: the pool, and the slot of a sequence in it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_armllm.kv_cache.block_pool import BlockPool, CacheShape
from torch_armllm.kv_cache.budget import size_kv_memory
from torch_armllm.kv_cache.sequence_blocks import SequenceBlocks
from torch_armllm.kv_cache.shapes import StatesOnlyShape, with_state_dtype
from torch_armllm.kv_cache.states import StateGroup, StateShape

STATES = StateShape((StateGroup(2, (3, 4), torch.bfloat16), StateGroup(1, (2, 5), torch.float32, True)))
SHAPE = CacheShape(2, 1, 4, 3, torch.float32, block_size=16, states=STATES)
GB = 10**9


def write(sequence: SequenceBlocks, value: float) -> None:
    assert sequence.state is not None
    for tensor in sequence.pool.states.tensors:
        tensor[:, sequence.state] = value


def read(sequence: SequenceBlocks) -> float:
    assert sequence.state is not None
    values = {float(v) for t in sequence.pool.states.tensors for v in t[:, sequence.state].unique()}
    assert len(values) == 1
    return values.pop()


def test_sizes() -> None:
    assert STATES.bytes_per_sequence == 2 * 12 * 2 + 10 * 4
    assert [tuple(t.shape) for t in STATES.tensors(7)] == [(2, 7, 3, 4), (1, 7, 2, 5)]
    assert not StateShape() and StateShape().bytes_per_sequence == 0


def test_only_states_that_accumulate_get_another_dtype() -> None:
    narrow = STATES.stored_as(torch.bfloat16)
    assert (STATES.accumulated_dtype, narrow.accumulated_dtype) == (torch.float32, torch.bfloat16)
    assert narrow.bytes_per_sequence == STATES.bytes_per_sequence - 10 * 2
    inputs = StateShape((StateGroup(2, (3, 4), torch.float32),))
    assert inputs.stored_as(torch.bfloat16) == inputs and inputs.accumulated_dtype is None
    assert with_state_dtype(SHAPE, torch.bfloat16).states == narrow


def test_models_without_recurrent_layers_have_no_slots() -> None:
    sequence = SequenceBlocks(BlockPool(CacheShape(2, 1, 4, 3, torch.float32)))
    sequence.append(3)
    assert sequence.state is None and sequence.fork().state is None
    sequence.truncate(1)


def test_fork_copies_states_at_once() -> None:
    first = SequenceBlocks(BlockPool(SHAPE))
    first.append(5)
    write(first, 1.0)
    second = first.fork()
    write(first, 2.0)
    assert (read(first), read(second)) == (2.0, 1.0)
    assert first.state != second.state


def test_states_cannot_go_back() -> None:
    sequence = SequenceBlocks(BlockPool(SHAPE))
    sequence.append(20)
    sequence.truncate(20)
    with pytest.raises(ValueError, match="13 of 20 positions cannot be dropped: the states of recurrent"):
        sequence.truncate(7)
    assert sequence.length == 20
    sequence.truncate(0)
    assert sequence.state is None and sequence.pool.states.free == len(sequence.pool.states)


def test_reset_frees_every_slot() -> None:
    pool = BlockPool(SHAPE)
    for _ in range(5):
        SequenceBlocks(pool).append(1)
    pool.reset()
    assert pool.states.free == len(pool.states) >= 5


@settings(max_examples=100, deadline=None)
@given(
    actions=st.lists(
        st.tuples(st.sampled_from(("new", "append", "fork", "release")), st.integers(0, 9)), max_size=40
    )
)
def test_each_sequence_keeps_its_states(actions: list[tuple[str, int]]) -> None:
    pool = BlockPool(SHAPE)
    alive: list[tuple[SequenceBlocks, float]] = []
    for number, (action, choice) in enumerate(actions, 1):
        if action == "new":
            sequence = SequenceBlocks(pool)
            sequence.append(choice)
            write(sequence, number)
            alive.append((sequence, number))
        elif alive:
            sequence, value = alive.pop(choice % len(alive))
            if action == "release":
                sequence.release()
                continue
            if action == "fork":
                alive.append((sequence.fork(), value))
            sequence.append(1)
            write(sequence, number)
            alive.append((sequence, number))
    assert [read(sequence) for sequence, _ in alive] == [value for _, value in alive]
    assert pool.states.free == len(pool.states) - len(alive)
    for sequence, _ in alive:
        sequence.release()
    assert pool.states.free == len(pool.states) and pool.free == len(pool)


def test_states_get_at_most_half_of_the_memory() -> None:
    big = StateShape((StateGroup(30, (32, 128, 128), torch.float32, True),))
    shape = CacheShape(10, 2, 128, 128, torch.bfloat16, states=big)
    found = size_kv_memory(shape, 4096, max_num_seqs=64, memory=2 * GB, free=8 * GB)
    assert found.state_bytes == big.bytes_per_sequence == 30 * 32 * 128 * 128 * 4
    assert found.state_slots == GB // found.state_bytes
    used = found.num_blocks * found.block_bytes + found.state_slots * found.state_bytes
    assert 2 * GB - found.block_bytes < used <= 2 * GB
    assert f"for {found.state_slots} sequences" in str(found)
    few = size_kv_memory(shape, 4096, max_num_seqs=3, memory=2 * GB, free=8 * GB)
    assert few.state_slots == 3
    message = "the states of one sequence need 62.9 MB, but the KV cache has 50.*raise kv_cache_memory"
    with pytest.raises(ValueError, match=message + r', or store them as bfloat16 \(state_dtype="bfloat16"\)'):
        size_kv_memory(shape, 4096, memory=50 * 10**6, free=8 * GB)
    narrow = with_state_dtype(shape, torch.bfloat16)
    assert size_kv_memory(narrow, 64, memory=50 * 10**6, free=8 * GB).state_bytes == found.state_bytes // 2
    with pytest.raises(ValueError, match="the states of one sequence need 31.5 MB.*raise kv_cache_memory$"):
        size_kv_memory(narrow, 4096, memory=20 * 10**6, free=8 * GB)


def test_swap_space_holds_states_too() -> None:
    found = size_kv_memory(SHAPE, 64, max_num_seqs=4, memory=10**6, swap_space=10**4, free=GB)
    assert found.swap_state_slots == 4
    assert found.swap_blocks == (10**4 - 4 * STATES.bytes_per_sequence) // found.block_bytes


def test_states_of_models_without_keys_take_all_the_memory() -> None:
    shape = StatesOnlyShape(torch.float32, states=STATES)
    size = STATES.bytes_per_sequence
    found = size_kv_memory(shape, 1000, max_num_seqs=64, memory=10 * size, swap_space=3 * size, free=10**9)
    assert (found.state_slots, found.swap_state_slots, found.max_model_len) == (10, 3, 1000)
    assert (found.num_blocks, found.swap_blocks) == (10 * 32, 3 * 32)  # each slot has room for all positions
    assert found.block_bytes == 0 and "no keys and values" in str(found) and "10 sequences" in str(found)
    assert size_kv_memory(shape, 1000, max_num_seqs=2, free=10**9).state_slots == 2
    with pytest.raises(ValueError, match="the states of one sequence need"):
        size_kv_memory(shape, 1000, memory=size - 1, free=10**9)
