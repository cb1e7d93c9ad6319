"""State slots of scheduled sequences: planned and rolling checkpoints, drafts, preemption."""

from __future__ import annotations

import pytest

from tests.support.simulation import Simulation, next_token, request
from torch_armllm.engine.request import Sequence
from torch_armllm.engine.scheduling.scheduler import SchedulerConfig
from torch_armllm.kv_cache.block_manager import BlockManager

SIZE = 4


def simulation(
    num_blocks: int = 64, spare: int = 40, *, swap: int = 0, caching: bool = True, **limits: object
) -> Simulation:
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 512, "max_model_len": 240, "max_step_time": None}
    config = SchedulerConfig(**{**settings, **limits})  # type: ignore[arg-type]
    slots = (config.max_num_seqs, 4 if swap else 0, spare)
    return Simulation(config, BlockManager(num_blocks, SIZE, swap, caching, *slots))


def prompt(length: int, seed: int = 0) -> list[int]:
    return [hash((seed, i)) // 3 % 3 for i in range(length)]


def checkpoints(run: Simulation, tokens: list[int]) -> list[int]:
    """Returns the lengths of the prefixes of a text that have a checkpoint."""
    cache, states = run.blocks.prefix_cache, run.blocks.states
    assert cache is not None and states is not None
    table = run.blocks.find(tokens, len(tokens))
    return [SIZE * (i + 1) for i, block in enumerate(table) if states.find(cache.content(block)) is not None]


@pytest.mark.parametrize(
    ("length", "spare", "expected"),
    [
        (1, 40, []),
        (4, 40, []),
        (5, 40, [4]),
        (30, 40, [28]),
        (70, 40, [32, 64, 68]),
        (200, 40, [64, 128, 192, 196]),
        (200, 16, [128, 196]),
        (200, 7, [196]),
        (200, 1, [196]),
        (200, 0, []),
    ],
)
def test_prompts_leave_checkpoints(length: int, spare: int, expected: list[int]) -> None:
    run = simulation(spare=spare)
    run.add(request("a", prompt(length), max_tokens=1))
    run.run()
    run.check_end()
    assert checkpoints(run, prompt(length)) == expected


def test_checkpoints_do_not_depend_on_chunks() -> None:
    run = simulation(max_num_batched_tokens=7)
    run.add(request("a", prompt(200), max_tokens=1))
    run.run()
    assert checkpoints(run, prompt(200)) == [64, 128, 192, 196]


def test_second_prompt_leaves_a_checkpoint_where_it_parts() -> None:
    run = simulation(spare=7)
    first, second = prompt(50), prompt(22) + prompt(30, 1)
    for number, text in enumerate((first, second)):
        run.add(request(str(number), text, max_tokens=1))
        run.run()
    common = [SIZE * i for i in range(14) if first[: SIZE * i] == second[: SIZE * i]][-1]
    assert checkpoints(run, second) == [common, 48]
    third = run.add(request("2", second[:common] + prompt(9, 2), max_tokens=1))
    run.run()
    assert third.num_cached_tokens >= common


def test_decoding_leaves_its_last_checkpoint() -> None:
    run = simulation(spare=3)
    made = run.add(request("a", prompt(9), max_tokens=31))
    run.run()
    text = made.sequences[0].token_ids
    assert checkpoints(run, text) == [8, 36]
    follow = run.add(request("b", [*text, 1, 2], max_tokens=1))
    run.run()
    assert follow.num_cached_tokens == 36
    run.check_end()


def right(sequence: Sequence, count: int) -> list[int]:
    text = list(sequence.token_ids)
    for _ in range(count):
        text.append(next_token(text, sequence.index))
    return text[len(sequence.token_ids) :]


@pytest.mark.parametrize("accepted", range(6))
@pytest.mark.parametrize("length", range(5, 10))
def test_rejected_drafts_leave_the_state_before_them(length: int, accepted: int) -> None:
    run = simulation(spare=6)
    made = run.add(request("a", prompt(length), max_tokens=30))
    (sequence,) = made.sequences

    def draft(sequence: Sequence) -> list[int]:
        found = right(sequence, 5)
        return found if accepted == 5 else [*found[:accepted], (found[accepted] + 1) % 3, *found[accepted:4]]

    while not made.finished:
        run.step(draft)
    text = sequence.token_ids
    (passed,) = (n for n in checkpoints(run, text) if n > length)
    # the state at the last boundary may have become the sequence's own in its last step
    assert passed >= (len(text) - 1) // SIZE * SIZE - SIZE
    run.check_end()


def test_drafts_are_shortened_to_half_of_the_spare_slots() -> None:
    run = simulation(spare=5)
    requests = [run.add(request(str(i), prompt(6, i), max_tokens=30)) for i in range(2)]
    most = 0
    while not all(each.finished for each in requests):
        step = run.step(lambda sequence: right(sequence, 5))
        drafted = [s.count - 1 for s in step.scheduled if s.start > 6]
        assert sum(drafted) <= 3
        most = max(most, *drafted, 0)
    assert most == 3
    run.check_end()


@pytest.mark.parametrize("swap", [0, 20])
def test_preempted_sequences_return_to_their_checkpoints(swap: int) -> None:
    run = simulation(12, swap=swap, preemption="swap" if swap else "recompute")
    for number in range(3):
        run.add(request(str(number), prompt(11, number), max_tokens=20))
    run.run()
    run.check_end()
    assert run.scheduler.preemptions > 0
    moves = [move.kind for step in run.steps for move in step.state_moves]
    assert set(moves) == ({"swap_out", "swap_in"} if swap else {"copy"})
    starts = {s.start for step in run.steps for s in step.scheduled if s.count > 1}
    assert swap or max(starts) >= 8


def test_slots_of_aborted_sequences_are_free_in_any_state() -> None:
    for stop in range(1, 12):
        run = simulation(14, 6, swap=6, preemption="swap", max_num_batched_tokens=9)
        for number in range(5):
            run.add(request(str(number), prompt(13, number), n=1 + number % 2, max_tokens=9))
        for _ in range(stop):
            run.step(lambda sequence: right(sequence, 3), abort=None)
        for number in range(5):
            run.scheduler.abort(str(number))
            run.check()
        states = run.blocks.states
        assert states is not None and states.free == len(states) and states.saved == 0
        assert run.blocks.swapped_states.free == 4


def test_many_waiting_sequences_need_no_slots() -> None:
    run = simulation(max_num_seqs=2)
    for number in range(10_000):
        run.scheduler.add(request(str(number), prompt(5 + number % 3, number), max_tokens=1))
    states = run.blocks.states
    assert states is not None and states.free == len(states) == 42
    for _ in range(20):
        step = run.scheduler.schedule()
        assert len(step.scheduled) <= 2
        sampled = {s.sequence: [0] for s in step.scheduled if s.samples}
        run.scheduler.complete(step, sampled)
        for sequence in sampled:
            run.scheduler.finish(sequence, "length")
    assert run.scheduler.waiting == 10_000 - 40
