"""The block pool, and the block table of a sequence in it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_armllm.kv_cache.block_pool import BlockPool, CacheShape
from torch_armllm.kv_cache.sequence_blocks import SequenceBlocks

SHAPE = CacheShape(layers=2, kv_heads=1, head_size=4, value_size=3, dtype=torch.float32, block_size=16)


def test_blocks_are_allocated_once_and_freed() -> None:
    pool = BlockPool(SHAPE, blocks=4)
    taken = pool.allocate(3)
    assert len(set(taken)) == 3 and pool.free == 1
    pool.share(taken[:1])
    pool.deallocate(taken)
    assert pool.free == 3 and not pool.is_shared(taken[0])
    pool.deallocate(taken[:1])
    assert pool.free == 4


def test_reset_frees_every_block() -> None:
    pool = BlockPool(SHAPE, blocks=4)
    pool.share(pool.allocate(3))
    pool.reset()
    assert pool.free == 4
    assert not pool.is_shared(0)


def test_double_free_raises() -> None:
    pool = BlockPool(SHAPE, blocks=2)
    blocks = pool.allocate(1)
    pool.deallocate(blocks)
    with pytest.raises(AssertionError):
        pool.deallocate(blocks)


def test_growth_preserves_contents() -> None:
    pool = BlockPool(SHAPE, blocks=1)
    (first,) = pool.allocate(1)
    pool.cache.k[:, first] = 7.0
    blocks = pool.allocate(5)
    assert first not in blocks and len(pool) >= 6
    assert bool((pool.cache.k[:, first] == 7.0).all()) and pool.cache.v.shape[1] == len(pool)


def test_shared_block_is_copied_on_write() -> None:
    pool = BlockPool(SHAPE)
    sequence = SequenceBlocks(pool)
    sequence.append(20)
    pool.cache.k[:, sequence.blocks[1]] = 3.0
    other = sequence.fork()
    assert other.blocks == sequence.blocks
    (slot,) = other.append(1)
    assert other.blocks[0] == sequence.blocks[0] and other.blocks[1] != sequence.blocks[1]
    assert slot == other.blocks[1] * 16 + 4
    assert bool((pool.cache.k[:, other.blocks[1]] == 3.0).all())
    sequence.append(1)
    assert sequence.blocks[1] != other.blocks[1]


def test_full_shared_block_is_not_copied() -> None:
    pool = BlockPool(SHAPE)
    sequence = SequenceBlocks(pool)
    sequence.append(16)
    other = sequence.fork()
    other.append(1)
    assert other.blocks[0] == sequence.blocks[0] and len(sequence.blocks) == 1


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("aftr"), st.integers(0, 40)), max_size=25))
def test_random_operations_leak_no_blocks(actions: list[tuple[str, int]]) -> None:
    pool = BlockPool(SHAPE, blocks=2)
    sequences = [SequenceBlocks(pool)]
    for action, number in actions:
        sequence = sequences[number % len(sequences)]
        if action == "a":
            slots = sequence.append(number)
            assert len(slots) == number and slots == sequence.slots()[sequence.length - number :]
        elif action == "f":
            sequences.append(sequence.fork())
        elif action == "t":
            sequence.truncate(min(number, sequence.length))
        else:
            sequence.release()
        held = {block for s in sequences for block in s.blocks}
        assert pool.free == len(pool) - len(held)
    for sequence in sequences:
        sequence.release()
    assert pool.free == len(pool)
