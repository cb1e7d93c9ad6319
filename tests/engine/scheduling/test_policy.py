"""Scheduling policies: order of admission and of preemption."""

from __future__ import annotations

import pytest

from tests.support.simulation import counts, request, simulation
from torch_armllm.engine.request import Request
from torch_armllm.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from torch_armllm.kv_cache.block_manager import BlockManager


def test_requests_run_in_order_of_priority_then_arrival() -> None:
    run = simulation(max_num_seqs=1, max_num_batched_tokens=8)
    for name, priority in (("a", 1), ("b", 0), ("c", 0), ("d", -1)):
        run.add(request(name, [1], priority=priority, max_tokens=1))
    assert [counts(run.step())[0][0] for _ in range(4)] == ["d", "b", "c", "a"]


def test_custom_policy_sets_the_order() -> None:
    class ShortFirst:
        def sort_key(self, request: Request) -> float:
            return len(request.prompt_token_ids)

    scheduler = Scheduler(SchedulerConfig(max_num_seqs=1), BlockManager(8, 4), ShortFirst())
    scheduler.add(request("long", [1, 2, 3]))
    scheduler.add(request("short", [1]))
    assert counts(scheduler.schedule()) == [("short", 0, 1)]


def test_worse_priority_is_preempted_regardless_of_age() -> None:
    run = simulation(4, caching=False)
    run.add(request("old", [1] * 3, priority=1, max_tokens=9))
    run.step()
    run.add(request("urgent", [2] * 3, max_tokens=9))
    while not (step := run.step()).preempted:
        pass
    assert [a.request.request_id for a in step.preempted] == ["old"]


def test_better_request_preempts_the_worst_for_its_slot() -> None:
    run = simulation(max_num_seqs=2, max_num_batched_tokens=8)
    run.add(request("worse", [1, 2], priority=2, max_tokens=9))
    run.add(request("worst", [1], priority=3, max_tokens=9))
    run.step()
    run.add(request("better", [2] * 3, priority=1, max_tokens=3))
    step = run.step()
    assert [a.request.request_id for a in step.preempted] == ["worst"]
    assert counts(step) == [("worse", 2, 1), ("better", 0, 3)]
    run.add(request("as good", [2], priority=1, max_tokens=3))
    assert [a.request.request_id for a in run.step().preempted] == ["worse"]
    run.add(request("late", [2], priority=1, max_tokens=3))
    while not run.requests[2].finished:
        assert not run.step().preempted  # an equal priority preempts nobody
    run.run()
    run.check_end()


@pytest.mark.parametrize("swap_blocks", [0, 20])
def test_better_request_preempts_as_many_as_its_blocks_need(swap_blocks: int) -> None:
    run = simulation(
        12,
        swap_blocks=swap_blocks,
        caching=False,
        max_num_seqs=8,
        max_num_batched_tokens=40,
        preemption="swap" if swap_blocks else "recompute",
    )
    for number in range(3):
        run.add(request(f"worse {number}", [number] * 9, priority=1, max_tokens=9))
    run.step()
    run.add(request("better", [2] * 18, max_tokens=9))
    step = run.step()
    assert [a.request.request_id for a in step.preempted] == ["worse 2", "worse 1"]
    assert counts(step) == [("worse 0", 9, 1), ("better", 0, 18)]
    assert len(step.swaps_out) == (6 if swap_blocks else 0)
    run.run()
    run.check_end()


def test_all_running_sequences_may_be_preempted_in_one_step() -> None:
    run = simulation(5, caching=False, max_num_seqs=4, max_num_batched_tokens=20)
    run.add(request("worse", [1] * 5, priority=1, max_tokens=9))
    run.step()
    run.add(request("better", [2] * 15, max_tokens=3))
    step = run.step()
    assert len(step.preempted) == 1 and counts(step) == [("better", 0, 15)]
    run.run()
    run.check_end()


def test_no_preemption_if_the_request_still_does_not_fit() -> None:
    run = simulation(10, caching=False, max_num_seqs=4, max_num_batched_tokens=60)
    run.add(request("equal", [1] * 20, max_tokens=7))
    run.add(request("worse", [1] * 3, priority=1, max_tokens=16))
    run.step()
    run.add(request("late", [2] * 28, max_tokens=3))
    while not run.requests[0].finished:
        assert not run.step().preempted
    assert [a.request.request_id for a in run.step().preempted] == ["worse"]
    run.run()
    run.check_end()


def test_better_request_interrupts_a_long_prefill() -> None:
    run = simulation(max_num_seqs=4, max_num_batched_tokens=8)
    run.add(request("long", [1] * 40, priority=1))
    assert counts(run.step()) == [("long", 0, 8)]
    run.add(request("better", [2] * 5))
    run.add(request("later", [2] * 5, priority=1))
    assert counts(run.step()) == [("better", 0, 5), ("long", 8, 3)]
    assert counts(run.step()) == [("better", 5, 1), ("long", 11, 7)]
