"""The scheduler, case by case."""

from __future__ import annotations

import pytest

from tests.support.simulation import counts, request, simulation
from torch_armllm.engine.request import Request, Sequence
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from torch_armllm.kv_cache.block_manager import BlockManager


def test_prefill_uses_the_tokens_left_by_decode() -> None:
    run = simulation(max_num_seqs=4, max_num_batched_tokens=6)
    run.add(request("a", [1], max_tokens=9))
    run.add(request("b", [1, 2], max_tokens=9))
    assert counts(run.step()) == [("a", 0, 1), ("b", 0, 2)]
    run.add(request("long", [2] * 10))
    assert counts(run.step()) == [("a", 1, 1), ("b", 2, 1), ("long", 0, 4)]
    run.add(request("late", [0]))
    assert counts(run.step()) == [("a", 2, 1), ("b", 3, 1), ("long", 4, 4)]
    assert counts(run.step()) == [("a", 3, 1), ("b", 4, 1), ("long", 8, 2), ("late", 0, 1)]
    run.run()
    run.check_end()


def test_admission_reserves_a_block_per_running_sequence() -> None:
    run = simulation(5, caching=False)
    for name in "ab":
        run.add(request(name, [1] * 3, max_tokens=5))
    run.step()
    run.add(request("c", [2] * 5, max_tokens=2))
    assert run.blocks.free == 3 and len(run.step().scheduled) == 2
    run.run()
    assert run.scheduler.preemptions == 0
    run.check_end()


def test_unchunked_prompt_waits_until_it_fits() -> None:
    run = simulation(
        max_num_seqs=4, max_num_batched_tokens=8, max_model_len=8, enable_chunked_prefill=False, caching=False
    )
    run.add(request("a", [1], max_tokens=3))
    run.add(request("b", [1, 2], max_tokens=3))
    run.add(request("long", [2] * 6, max_tokens=1))
    run.add(request("late", [2], max_tokens=1))
    assert counts(run.step()) == [("a", 0, 1), ("b", 0, 2)]
    assert counts(run.step()) == [("a", 1, 1), ("b", 2, 1), ("long", 0, 6)]
    assert counts(run.step()) == [("a", 2, 1), ("b", 3, 1), ("late", 0, 1)]


def test_forked_sequences_share_full_blocks_and_copy_the_last() -> None:
    run = simulation(max_num_seqs=3)
    asked = run.add(request("a", [1, 2, 0, 1, 2], n=3, max_tokens=4))
    run.step()
    first, *others = asked.sequences
    assert [a.index for a in others] == [1, 2] and all(a.computed == 5 for a in others)
    assert all(a.blocks == first.blocks for a in others) and run.blocks.free == 62
    step = run.step()
    assert len(step.copies) == 2 and {old for old, _ in step.copies} == {others[1].blocks[1]}
    assert len({a.blocks[1] for a in asked.sequences}) == 3
    assert {a.blocks[0] for a in asked.sequences} == {first.blocks[0]}
    run.run()
    run.check_end()


def test_slots_are_reserved_for_all_sequences_of_a_request() -> None:
    run = simulation(max_num_seqs=4, max_num_batched_tokens=4)
    run.add(request("three", [1] * 6, n=3, max_tokens=2))
    run.add(request("two", [2], n=2, max_tokens=2))
    assert counts(run.step()) == [("three", 0, 4)]
    assert counts(run.step()) == [("three", 4, 2)], "two more would be five"
    assert counts(run.step()) == [("three", 6, 1)] * 3
    assert counts(run.step()) == [("two", 0, 1)]


def test_prompts_reuse_cached_prefixes() -> None:
    run = simulation()
    run.add(request("a", [1] * 9, max_tokens=1))
    run.run()
    again = run.add(request("b", [1] * 9, max_tokens=1))
    whole = run.add(request("c", [1] * 8, max_tokens=1))
    assert counts(run.step()) == [("b", 8, 1), ("c", 4, 4)], "the last token's logits are needed"
    assert (again.num_cached_tokens, whole.num_cached_tokens) == (8, 4)
    assert run.blocks.hit_rate == 12 / (8 + 8 + 7)
    run.check_end()


def test_prompt_logprobs_disable_the_prefix_cache() -> None:
    run = simulation()
    run.add(request("a", [1] * 9, max_tokens=1))
    run.run()
    run.add(request("b", [1] * 9, max_tokens=1, prompt_logprobs=0))
    assert counts(run.step()) == [("b", 0, 9)]


def test_conversation_reuses_cached_prompt_and_output() -> None:
    run = simulation()
    first = run.add(request("1", [1, 2, 3], max_tokens=6))
    run.run()
    history = first.sequences[0].token_ids
    assert len(history) == 9
    second = run.add(request("2", [*history, 5], max_tokens=2))
    run.run()
    assert second.num_cached_tokens == 8


def test_draft_tokens_are_verified_and_rolled_back() -> None:
    run = simulation(max_num_batched_tokens=64)
    run.add(request("a", [1, 2, 3], max_tokens=12))
    run.step(draft=lambda sequence: [0, 0, 0, 0, 0, 0])
    step = run.step(draft=lambda sequence: [])
    (scheduled,) = step.scheduled
    sequence = scheduled.sequence
    assert scheduled.count == 7 and not sequence.draft
    assert sequence.computed == len(sequence.token_ids) - 1
    assert len(sequence.blocks) == -(-len(sequence.token_ids) // 4)


def test_draft_tokens_are_limited_by_free_blocks_and_token_budget() -> None:
    run = simulation(5, max_num_seqs=4, max_num_batched_tokens=5, caching=False)
    run.add(request("a", [1] * 3, max_tokens=9))
    run.add(request("b", [2], max_tokens=9))
    run.step(draft=lambda sequence: [0] * 6)
    step = run.step()
    assert counts(step) == [("a", 3, 4), ("b", 1, 1)], "five tokens in all"
    run = simulation(3, caching=False)
    run.add(request("a", [1] * 3, max_tokens=9))
    run.add(request("b", [2] * 3, max_tokens=2))
    run.step(draft=lambda sequence: [0] * 6)
    assert counts(run.step()) == [("a", 3, 1), ("b", 3, 1)], "two of three blocks are held"


def test_draft_tokens_stay_within_max_model_len() -> None:
    run = simulation(max_model_len=8)
    run.add(request("a", [1] * 4, max_tokens=9))
    run.step(draft=lambda sequence: [0] * 9)
    assert counts(run.step()) == [("a", 4, 4)]


def test_prefix_lookup_of_a_waiting_request_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    run = simulation(4)
    run.add(request("a", [1] * 4, max_tokens=9))
    run.step()
    run.add(request("large", [2] * 12, max_tokens=2))
    asked: list[int] = []
    find = run.blocks.find
    monkeypatch.setattr(run.blocks, "find", lambda *a: asked.append(a[1]) or find(*a))
    for _ in range(7):
        run.step()
    assert asked == [11]
    run.run()
    run.check_end()


def check_rejected(match: str, asked: Request, **limits: object) -> None:
    scheduler = simulation(4, **limits).scheduler
    with pytest.raises(ValueError, match=match):
        scheduler.add(asked)
    assert not scheduler.has_unfinished and not scheduler._keys


def test_unservable_requests_raise() -> None:
    check_rejected("has no prompt", request("a", []))
    check_rejected("has 16 tokens; the KV cache allows 16", request("a", [1] * 16))
    check_rejected("has 8 tokens; max_model_len allows 8", request("a", [1] * 8), max_model_len=8)
    check_rejected("wants 3 sequences; max_num_seqs is 2", request("a", [1], n=3), max_num_seqs=2)
    scheduler = simulation().scheduler
    scheduler.add(request("a", [1]))
    with pytest.raises(ValueError, match="'a' is not finished"):
        scheduler.add(request("a", [1]))


def test_one_sequence_may_fill_the_whole_cache() -> None:
    run = simulation(2, caching=False)
    asked = run.add(request("a", [1], max_tokens=100))
    run.run()
    assert len(asked.sequences[0].token_ids) == 8 == run.scheduler.max_length
    run.check_end()


@pytest.mark.parametrize(
    ("limits", "match"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs = 0"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 7}, "less than max_num_seqs = 8"),
        ({"enable_chunked_prefill": False, "max_model_len": 513}, "less than max_model_len = 513"),
        ({"preemption": "pause"}, "'recompute' or 'swap'"),
    ],
)
def test_contradictory_limits_raise(limits: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        SchedulerConfig(**limits)  # type: ignore[arg-type]


def test_tokens_of_an_aborted_sequence_are_ignored() -> None:
    scheduler = Scheduler(SchedulerConfig(), BlockManager(8, 4))
    asked = Request("a", [1, 2], SamplingParams(), seed=0)
    scheduler.add(asked)
    step = scheduler.schedule()
    scheduler.abort("a")
    sequence: Sequence = asked.sequences[0]
    scheduler.complete(step, {sequence: [7]})
    assert sequence.token_ids == [1, 2] and sequence.blocks == [] and not scheduler.schedule().scheduled
