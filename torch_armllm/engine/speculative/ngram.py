"""Prompt lookup: drafts what followed the last occurrence of the current n-gram."""

from __future__ import annotations

from collections.abc import Sequence as GenericSequence
from weakref import WeakKeyDictionary

from torch_armllm.engine.request import Sequence


class NgramIndex:
    """Index of the last occurrence of every n-gram in a growing token sequence.

    Args:
        min_n: length of the shortest n-grams.
        max_n: length of the longest n-grams, which are looked up first.
    """

    def __init__(self, min_n: int, max_n: int) -> None:
        self._sizes = range(max_n, min_n - 1, -1)
        self._continuations: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in self._sizes}
        self._end = 0

    def propose(self, tokens: GenericSequence[int], count: int) -> list[int]:
        """Returns up to ``count`` draft tokens, none if the last n-grams are new.

        Args:
            tokens: those of the last call, possibly with more tokens appended.
            count: most tokens.
        """
        self._extend(tokens)
        length = len(tokens)
        for size in self._sizes:
            if size > length:
                continue
            begin = self._continuations[size].get(tuple(tokens[length - size :]))
            if begin is not None:
                draft = list(tokens[begin : begin + count])
                # the continuation overlaps the end: extend it by itself, periodically
                while len(draft) < count:
                    draft.append(draft[begin - length])
                return draft
        return []

    def _extend(self, tokens: GenericSequence[int]) -> None:
        """Adds the n-grams that now have a following token."""
        for size in self._sizes:
            continuations = self._continuations[size]
            for end in range(max(self._end, size), len(tokens)):
                continuations[tuple(tokens[end - size : end])] = end
        self._end = max(self._end, len(tokens))


class NgramProposer:
    """Drafts the continuation of an earlier n-gram (Saxena, "Prompt lookup decoding", 2023).

    The cost of a step depends on its new tokens only, not on the context length.

    Args:
        min_n: fewest last tokens that must have occurred before.
        max_n: number of last tokens that are looked up first.
    """

    chooses_lengths = False

    def __init__(self, min_n: int, max_n: int) -> None:
        self._lengths = min_n, max_n
        self._indices: WeakKeyDictionary[Sequence, NgramIndex] = WeakKeyDictionary()

    def probabilities(self, sequence: Sequence) -> None:
        """Returns None: these drafts are not sampled."""

    def record_step(self, sequences: int, drafted: int, seconds: float) -> None:
        """Does nothing: lengths do not depend on times."""

    def propose(self, sequences: GenericSequence[Sequence], counts: GenericSequence[int]) -> list[list[int]]:
        """Returns one draft per sequence."""
        drafts = []
        for sequence, count in zip(sequences, counts, strict=True):
            index = self._indices.get(sequence)
            if index is None:
                index = self._indices[sequence] = NgramIndex(*self._lengths)
            drafts.append(index.propose(sequence.token_ids, count) if count > 0 else [])
        return drafts
