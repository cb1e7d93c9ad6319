"""Preemption: sequences lose their blocks, which are swapped or recomputed."""

from __future__ import annotations

import pytest

from tests.support.simulation import request, simulation
from torch_armllm.engine.request import Status
from torch_armllm.engine.scheduling.block_tables import BlockTables
from torch_armllm.engine.scheduling.step import Step
from torch_armllm.kv_cache.block_manager import BlockManager


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_youngest_sequence_is_preempted_and_resumed(preemption: str) -> None:
    run = simulation(4, swap_blocks=4, caching=False, preemption=preemption)
    old = run.add(request("old", [1] * 6, max_tokens=7))
    young = run.add(request("young", [2] * 3, max_tokens=6))
    while not (step := run.step()).preempted:
        pass
    (sequence,) = young.sequences
    assert step.preempted == [sequence] and young.metrics.preemptions == 1 and run.scheduler.preemptions == 1
    swapped = preemption == "swap"
    assert sequence.status is (Status.SWAPPED if swapped else Status.WAITING)
    assert (run.scheduler.waiting, run.scheduler.swapped) == (1 - swapped, swapped)
    assert len(step.swaps_out) == (2 if swapped else 0) and (sequence.computed > 0) == swapped
    run.run()
    assert sum(len(s.swaps_in) for s in run.steps) == (2 if swapped else 0)
    assert old.metrics.preemptions == 0
    run.check_end()


def test_sequence_beyond_swap_space_is_recomputed() -> None:
    run = simulation(4, swap_blocks=1, caching=False, preemption="swap")
    run.add(request("old", [1] * 6, max_tokens=7))
    young = run.add(request("young", [2] * 3, max_tokens=6))
    while not run.step().preempted:
        pass
    assert young.sequences[0].status is Status.WAITING and not any(s.swaps_out for s in run.steps)
    run.run()
    run.check_end()


def test_preempted_prefill_with_several_sequences_frees_all_slots() -> None:
    run = simulation(8, max_num_seqs=4, max_num_batched_tokens=4, caching=False)
    run.add(request("old", [1] * 7, max_tokens=12))
    many = run.add(request("many", [2] * 19, n=3, max_tokens=2))
    while not (step := run.step()).preempted:
        pass
    assert step.preempted == many.sequences and many.sequences[0].computed == 0
    run.run()
    run.check_end()


@pytest.mark.parametrize("when", ["waiting", "prefilling", "decoding", "computed", "forked", "swapped"])
def test_abort_frees_all_blocks_in_every_state(when: str) -> None:
    run = simulation(6, swap_blocks=6, max_num_seqs=4, max_num_batched_tokens=4, preemption="swap")
    run.add(request("other", [1] * 4, max_tokens=16))
    aborted = run.add(request("a", [2] * 10, n=2 if when == "forked" else 1, max_tokens=9))
    if when == "waiting":
        assert run.scheduler.abort("a") is aborted
    elif when == "swapped":
        while aborted.sequences[0].status is not Status.SWAPPED:
            run.step()
        run.scheduler.abort("a")
    elif when in ("computed", "forked"):
        while aborted.sequences[0].computed < 8:
            run.step()
        run.step(abort="a" if when == "computed" else None)
        run.scheduler.abort("a")
    else:
        for _ in range({"prefilling": 2, "decoding": 6}[when]):
            run.step()
        run.scheduler.abort("a")
    assert aborted.finished and {a.finish_reason for a in aborted.sequences} == {"abort"}
    assert run.scheduler.abort("a") is None and run.scheduler.abort("unknown") is None
    run.run()
    run.check_end()


def test_blocks_being_swapped_in_are_not_found_in_the_prefix_cache() -> None:
    run = simulation(4, swap_blocks=8, block_size=2, preemption="swap")
    run.add(request("old", [1], max_tokens=6))
    young = run.add(request("young", [2] * 3, max_tokens=5))
    (sequence,) = young.sequences
    while not run.step().preempted:
        pass
    run.blocks.deallocate(run.blocks.allocate(run.blocks.free))  # evicts every cached block
    while sequence.status is Status.SWAPPED:
        before = list(sequence.token_ids)
        step = run.scheduler.schedule()
        if sequence.status is Status.RUNNING:
            assert step.swaps_in and run.blocks.find(before, 2) == []
        run.execute(step)
        drawn = {s.sequence: run.draw(s.sequence, 0) for s in step.scheduled}
        run.scheduler.complete(step, drawn)
        for other in drawn:
            if other.output_length == other.params.max_tokens:
                run.scheduler.finish(other, "length")
    assert run.blocks.find(before, 2) == sequence.blocks[:1]
    run.run()
    run.check_end()


def test_partially_prefilled_swapped_prompt_shares_only_full_blocks() -> None:
    blocks = BlockManager(16, 2, swap_blocks=8)
    tables, step = BlockTables(blocks), Step()
    tokens = [1, 2, 3, 4, 5, 6, 7]
    (half,), (whole,) = request("half", tokens).sequences, request("whole", tokens).sequences
    assert tables.admit(half, step, reserve=0, max_uncomputed=7)
    half.computed = 3
    assert tables.swap_out(half, step) and len(step.swaps_out) == 2
    assert tables.admit(whole, step, reserve=0, max_uncomputed=7)
    tables.advance(whole, 0, 7, [8])
    assert tables.admit(half, step, reserve=0, max_uncomputed=7)
    assert half.computed == 3 and half.blocks[0] == whole.blocks[0]
    assert not {*half.blocks[1:]} & {*whole.blocks}
    assert [block for _, block in step.swaps_in] == half.blocks[1:2]
    tables.free(half)
    tables.free(whole)
    assert blocks.free == 16 and blocks.swap.free == 8 and not tables._arriving
