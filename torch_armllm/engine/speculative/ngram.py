"""Guesses from the text itself: how did it go on where it last said the same?"""

from __future__ import annotations

from collections.abc import Sequence as GenericSequence
from weakref import WeakKeyDictionary

from torch_armllm.engine.request import Sequence


class NgramIndex:
    """Where every run of a few tokens last stood in a text that grows.

    Args:
        shortest: tokens of the shortest runs that are looked up.
        longest: tokens of the longest.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._behind: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in self._sizes}
        self._end = 0

    def propose(self, text: GenericSequence[int], count: int) -> list[int]:
        """How a text might go on: up to ``count`` tokens, none where its end is nothing that it said before.

        Args:
            text: the one of the last call, or that with more tokens behind it.
            count: most tokens.
        """
        self._extend(text)
        length = len(text)
        for size in self._sizes:
            if size > length:
                continue
            begin = self._behind[size].get(tuple(text[length - size :]))
            if begin is not None:
                found = list(text[begin : begin + count])
                # a text that repeats itself goes on with its own continuation
                while len(found) < count:
                    found.append(found[begin - length])
                return found
        return []

    def _extend(self, text: GenericSequence[int]) -> None:
        """Enters the runs that a token follows by now."""
        for size in self._sizes:
            behind = self._behind[size]
            for end in range(max(self._end, size), len(text)):
                behind[tuple(text[end - size : end])] = end
        self._end = max(self._end, len(text))


class NgramProposer:
    """Proposes what followed in a sequence's prompt or text (Saxena, "Prompt lookup decoding", 2023).

    A step costs the new tokens only, however long the text is.

    Args:
        shortest: fewest last tokens that must stand in the text already.
        longest: so many are looked up first.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._runs = shortest, longest
        self._indices: WeakKeyDictionary[Sequence, NgramIndex] = WeakKeyDictionary()

    def probabilities(self, sequence: Sequence) -> None:
        """None: nothing is drawn."""

    def propose(self, sequences: GenericSequence[Sequence], counts: GenericSequence[int]) -> list[list[int]]:
        """Drafts, a list a sequence."""
        drafts = []
        for sequence, count in zip(sequences, counts, strict=True):
            index = self._indices.get(sequence)
            if index is None:
                index = self._indices[sequence] = NgramIndex(*self._runs)
            drafts.append(index.propose(sequence.token_ids, count) if count > 0 else [])
        return drafts
