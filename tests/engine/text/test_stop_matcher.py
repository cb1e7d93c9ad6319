"""Search for stop strings: equal to a plain search, and each character is looked at once."""

from __future__ import annotations

import random

import pytest

from torch_armllm.engine.text.stop_matcher import StopMatcher


def held(text: str, stop: str) -> int:
    """Returns the length of the longest end of the text that begins the stop string, and is not all of it."""
    return max(n for n in range(len(stop)) if text.endswith(stop[:n]))


@pytest.mark.parametrize("seed", range(20))
def test_results_are_those_of_a_plain_search(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(100):
        stop = "".join(draw.choices("ab", k=draw.randint(1, 6)))
        text = "".join(draw.choices("abc", weights=(5, 5, 1), k=30))
        matcher, at, read = StopMatcher(stop), 0, 0
        while read < len(text):
            read = min(len(text), read + draw.randint(1, 4))
            wanted = [end for end in range(at + 1, read + 1) if text[:end].endswith(stop)]
            found = []
            while (end := matcher.find(text[:read], at)) is not None:
                found.append(end)
                at = end
            assert found == wanted
            at = read
            assert matcher.matched == held(text[:read], stop)


class Counting(str):
    """A text that counts how often one of its characters is looked at."""

    looks = 0

    def __getitem__(self, at: object) -> str:
        Counting.looks += 1
        return super().__getitem__(at)  # type: ignore[index]


@pytest.mark.parametrize(
    ("stop", "piece"), [("ab" + "a" * 3000, "a"), ("a" * 3000 + "b", "a"), ("ab" * 1500 + "c", "ab")]
)
def test_each_character_is_looked_at_once(stop: str, piece: str) -> None:
    matcher = StopMatcher(Counting(stop))
    text, Counting.looks = "", 0
    for _ in range(4000):
        before = len(text)
        text += piece
        assert matcher.find(text, before) is None
        assert matcher.matched == len(piece) * (matcher.matched // len(piece))
    assert Counting.looks < 8 * len(text)
