"""BlockManager: reference counts, shared blocks, prefix cache, swap blocks."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from torch_armllm.kv_cache.block_manager import BlockManager


def written(blocks: BlockManager, tokens: list[int]) -> list[int]:
    """Allocates blocks for the tokens and adds the full ones to the prefix cache."""
    table = blocks.allocate(-(-len(tokens) // blocks.block_size))
    blocks.cache_full_blocks(table, tokens, 0, len(tokens))
    return table


def test_blocks_are_allocated_once_and_freed() -> None:
    blocks = BlockManager(4, 2)
    taken = blocks.allocate(3)
    assert len(set(taken)) == 3 and blocks.free == 1 and blocks.usage == 0.75
    blocks.share(taken[:1])
    assert blocks.is_shared(taken[0]) and not blocks.is_shared(taken[1])
    blocks.deallocate(taken)
    assert blocks.free == 3
    blocks.deallocate(taken[:1])
    assert blocks.free == 4 and blocks.usage == 0


def test_double_free_and_overallocation_raise() -> None:
    blocks = BlockManager(2, 2)
    table = blocks.allocate(1)
    blocks.deallocate(table)
    with pytest.raises(AssertionError):
        blocks.deallocate(table)
    with pytest.raises(AssertionError):
        blocks.allocate(3)
    with pytest.raises(AssertionError):
        blocks.swap.allocate(1)


def test_full_blocks_are_found_by_their_prefix() -> None:
    blocks = BlockManager(8, 2)
    table = written(blocks, [1, 2, 3, 4, 5])
    assert blocks.find([1, 2, 3, 4, 5, 6], 6) == table[:2]
    assert blocks.find([1, 2, 3, 4], 3) == table[:1], "limited to the requested length"
    assert blocks.find([3, 4], 2) == [], "at another position"
    assert blocks.find([1, 2, 9, 4], 4) == table[:1]
    blocks.deallocate(table)
    assert blocks.free == 8 and blocks.count_free(table[:2]) == 2
    assert blocks.share(blocks.find([1, 2, 3, 4], 4)) == table[:2]
    assert blocks.free == 6 and blocks.count_free(table[:2]) == 0


def test_hash_collisions_are_distinguished() -> None:
    other = 2**61 - 1  # hash(other) == hash(0)
    assert hash((1, other)) == hash((1, 0))
    blocks = BlockManager(8, 2)
    first, second = written(blocks, [1, 0, 5, 6]), written(blocks, [1, other, 5, 6])
    assert blocks.find([1, 0, 5, 6], 4) == first
    assert blocks.find([1, other, 5, 6], 4) == second


def test_equal_blocks_after_different_prefixes_are_distinct() -> None:
    blocks = BlockManager(8, 2)
    first, second = written(blocks, [1, 1, 7, 7]), written(blocks, [2, 2, 7, 7])
    assert blocks.find([1, 1, 7, 7], 4) == first
    assert blocks.find([2, 2, 7, 7], 4) == second


def test_duplicate_prefixes_extend_one_cached_chain() -> None:
    blocks = BlockManager(8, 2)
    first, second = written(blocks, [1, 2]), written(blocks, [1, 2])
    assert blocks.find([1, 2], 2) == first
    second += blocks.allocate(1)
    blocks.cache_full_blocks(second, [1, 2, 3, 4], 2, 4)
    assert blocks.find([1, 2, 3, 4], 4) == [first[0], second[1]]
    blocks.deallocate(second)
    assert blocks.free == 7, "a duplicate block is not cached"
    blocks.deallocate(first)
    assert blocks.free == 8


def test_eviction_is_least_recently_used_and_suffix_first() -> None:
    blocks = BlockManager(4, 1)
    old, young = written(blocks, [1, 2]), written(blocks, [3, 4])
    blocks.deallocate(old)
    blocks.deallocate(young)
    blocks.deallocate(blocks.share(blocks.find([1], 1)))
    assert blocks.allocate(3) == [old[1], young[1], young[0]]
    assert blocks.find([1, 2], 2) == old[:1] and blocks.find([3], 1) == []


def test_uncached_blocks_are_allocated_before_cached_blocks() -> None:
    blocks = BlockManager(3, 1)
    table = written(blocks, [1, 2])
    blocks.deallocate(table)
    blocks.allocate(1)
    assert blocks.find([1, 2], 2) == table


def test_disabled_prefix_cache_finds_nothing() -> None:
    blocks = BlockManager(4, 1, enable_prefix_caching=False)
    table = written(blocks, [1, 2])
    assert blocks.find([1, 2], 2) == [] and blocks.hit_rate == 0
    blocks.deallocate(table)
    assert blocks.free == 4


def test_swap_blocks_are_counted() -> None:
    blocks = BlockManager(4, 1, swap_blocks=3)
    slots = blocks.swap.allocate(2)
    assert len(set(slots)) == 2 and blocks.swap.free == 1
    blocks.swap.deallocate(slots)
    assert blocks.swap.free == 3


def test_zero_blocks_raise() -> None:
    with pytest.raises(ValueError, match="0 blocks of 4 positions"):
        BlockManager(0, 4)


def test_allocation_work_is_independent_of_pool_size() -> None:
    def lines(num_blocks: int) -> int:
        blocks = BlockManager(num_blocks, 1)
        tokens = list(range(num_blocks))
        blocks.deallocate(written(blocks, tokens))  # all are now cached and idle: allocate evicts
        count = 0

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal count
            # The garbage collector may call finalizers of other modules here.
            if "torch_armllm/kv_cache" not in frame.f_code.co_filename:
                return None
            count += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            blocks.deallocate(blocks.allocate(8))
        finally:
            sys.settrace(before)
        return count

    assert 8 < lines(10_000) == lines(100)
