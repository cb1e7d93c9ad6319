"""State slots of an engine: running sequences, saved states and checkpoints share them."""

from __future__ import annotations

import pytest

from torch_armllm.kv_cache.block_manager import BlockManager
from torch_armllm.kv_cache.state_budget import StateShare, share_of_states
from torch_armllm.kv_cache.state_slots import StateSlots


def checkpoint(slots: StateSlots, content: int) -> int:
    slot = slots.save()
    assert slot is not None and slots.keep(slot, content)
    return slot


def test_checkpoints_give_way_in_the_order_of_their_use() -> None:
    slots = StateSlots(1, 3)
    first, second, third = (checkpoint(slots, content) for content in (7, 8, 9))
    slots.use(7)
    assert slots.free == len(slots) == 4 and slots.checkpoints == 3
    slots.allocate(1)
    assert [slots.find(content) for content in (7, 8, 9)] == [first, second, third]
    assert slots.save() == second, "8 was not used for longest"
    assert [slots.find(content) for content in (7, 8, 9)] == [first, None, third]


def test_saved_states_leave_each_sequence_a_slot() -> None:
    slots = StateSlots(2, 2)
    saved = [slots.save(), slots.save()]
    assert None not in saved and slots.save() is None
    assert len({*saved, *slots.allocate(2)}) == 4
    assert slots.free == 0
    slots.drop(saved[0])  # type: ignore[arg-type]
    assert slots.save() == saved[0]


def test_prefix_has_one_checkpoint() -> None:
    slots = StateSlots(1, 2)
    first, other = checkpoint(slots, 5), slots.save()
    assert other is not None and not slots.keep(other, 5)
    assert slots.find(5) == first and slots.saved == 0 and slots.free == 3


def test_forgotten_checkpoints_are_free() -> None:
    slots = StateSlots(1, 1)
    checkpoint(slots, 5)
    slots.forget(5)
    slots.forget(6)
    assert slots.find(5) is None and slots.checkpoints == 0 and slots.free == 2
    checkpoint(slots, 5)
    slots.save()
    slots.reset()
    assert slots.find(5) is None and slots.saved == 0 and slots.free == 2


def test_checkpoints_die_with_their_blocks() -> None:
    blocks = BlockManager(4, 2, state_slots=1, spare_state_slots=2)
    states, cache, tokens = blocks.states, blocks.prefix_cache, [1, 2, 3, 4, 5, 6]
    assert states is not None and cache is not None
    table = blocks.allocate(3)
    blocks.cache_full_blocks(table, tokens, 0, 6)
    slots = {}
    for length in (2, 6):
        content = cache.content_of(table, tokens, length)
        assert content is not None
        slots[length] = checkpoint(states, content)
    blocks.deallocate(table)
    assert blocks.find_checkpoint(tokens, 6) == (table, slots[6], table)
    assert blocks.find_checkpoint(tokens, 5) == (table[:1], slots[2], table[:2])
    assert blocks.find_checkpoint([1, 2, 9, 9], 4) == (table[:1], slots[2], table[:1])
    blocks.allocate(2)  # evicts the last block
    assert blocks.find_checkpoint(tokens, 6) == (table[:1], slots[2], table[:2])
    assert states.checkpoints == 1
    assert cache.content_of(table, tokens, 6) is None


def test_copies_of_a_block_share_its_checkpoint() -> None:
    blocks = BlockManager(4, 2, state_slots=1, spare_state_slots=2)
    assert blocks.prefix_cache is not None
    first, second = blocks.allocate(1), blocks.allocate(1)
    for table in (first, second):
        blocks.cache_full_blocks(table, [1, 2], 0, 2)
    contents = [blocks.prefix_cache.content_of(table, [1, 2], 2) for table in (first, second)]
    assert contents[0] == contents[1] is not None
    blocks.deallocate(first)
    blocks.allocate(3)  # the block that can be found is evicted, its copy stays with a sequence
    assert blocks.prefix_cache.content_of(second, [1, 2], 2) is None


@pytest.mark.parametrize(
    ("granted", "options", "expected"),
    [
        (200, {}, (4, 0)),
        (200, {"checkpoints": True}, (4, 6)),
        (1000, {"checkpoints": True}, (4, 16)),
        (60, {"checkpoints": True}, (2, 1)),
        (40, {"checkpoints": True}, (1, 1)),
        (39, {"checkpoints": True}, (1, 0)),
        (200, {"draft_tokens": 3}, (4, 6)),
        (1000, {"draft_tokens": 3}, (4, 12)),
        (80, {"draft_tokens": 3}, (2, 2)),
        (200, {"checkpoints": True, "needed": 140}, (4, 2)),
        (200, {"checkpoints": True, "needed": 195}, (1, 0)),
    ],
)
def test_spare_slots_get_a_share(granted: int, options: dict[str, int], expected: tuple[int, int]) -> None:
    share = share_of_states(10, granted, "as asked", 4, **options)  # type: ignore[arg-type]
    assert share == StateShare(*expected)
    assert share.slots * 10 <= max(10, granted // 2)


def test_models_without_recurrent_layers_have_no_slots() -> None:
    assert share_of_states(0, 100, "as asked", 4, checkpoints=True, draft_tokens=4) == (0, 0)
