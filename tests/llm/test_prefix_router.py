"""The choice of a replica by the prefix that it holds, and by its load."""

from __future__ import annotations

import random

from torch_armllm.llm.replicas.prefix_router import PrefixRouter

IDLE = {0: 0, 1: 0, 2: 0}
TEXT = list(range(100))


def _router(capacity: int = 10_000) -> PrefixRouter[int]:
    return PrefixRouter(capacity)


def test_a_conversation_goes_to_the_replica_that_holds_it() -> None:
    router = _router()
    router.record(1, TEXT)
    assert router.choose([*TEXT, 5, 6], IDLE) == 1
    assert router.choose([*TEXT, 5, 6], {0: 0, 1: 4, 2: 1}) == 1
    assert router.choose(TEXT[:40] + [7] * 10, IDLE) == 1


def test_the_longest_prefix_wins() -> None:
    router = _router()
    router.record(0, TEXT[:48])
    router.record(2, TEXT)
    assert router.choose(TEXT, {0: 0, 1: 0, 2: 3}) == 2


def test_a_short_common_beginning_does_not_count_against_load() -> None:
    router = _router()
    router.record(1, TEXT)
    assert router.choose(TEXT[:16] + [3] * 60, {0: 2, 1: 1, 2: 0}) == 2
    assert router.choose(TEXT[:16] + [3] * 60, {0: 1, 1: 1, 2: 1}) == 1  # among equal loads it does


def test_a_replica_with_many_more_sequences_is_left() -> None:
    router = _router()
    router.record(1, TEXT)
    assert router.choose(TEXT, {0: 1, 1: 6, 2: 0}) == 2
    assert router.choose(TEXT, {0: 20, 1: 30, 2: 21}) == 1
    assert router.choose(TEXT, {0: 20, 1: 31, 2: 21}) == 0


def test_dead_replicas_are_not_chosen_and_their_texts_are_forgotten() -> None:
    router = _router()
    router.record(1, TEXT)
    assert router.choose(TEXT, {0: 3, 2: 2}) == 2
    router.forget(1)
    assert router.choose(TEXT, {0: 0, 1: 0}) == 0


def test_adapters_have_prefixes_of_their_own() -> None:
    router = _router()
    router.record(1, TEXT, of=7)
    assert router.choose(TEXT, IDLE, of=7) == 1
    assert router.choose(TEXT, IDLE) == router.choose(TEXT, IDLE, of=8) == 0


def test_no_more_is_remembered_than_a_cache_holds() -> None:
    router = _router(capacity=160)
    router.record(1, TEXT)
    router.record(1, list(range(1000, 1100)))
    assert router.choose(list(range(1000, 1100)), IDLE) == 1
    assert router.choose(TEXT[:64], IDLE) == 1  # the beginning is kept longest
    router.record(1, list(range(2000, 2160)))
    assert router.choose(TEXT, IDLE) == 0


def test_conversations_stay_and_load_is_even() -> None:
    rng = random.Random(0)
    router, loads = _router(), dict(IDLE)
    system = list(range(500, 564))
    homes = []
    for number in range(30):
        turn = [*system, *(rng.randrange(97) for _ in range(200)), number]
        home = router.choose(turn, loads)
        router.record(home, turn)
        loads[home] += 1
        homes.append((home, turn))
    assert max(loads.values()) - min(loads.values()) <= 4
    for home, turn in homes:
        assert router.choose([*turn, 1, 2, 3], loads) == home
