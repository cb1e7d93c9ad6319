"""The choice of the replica that computes a request: the one that holds most of its prompt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

R = TypeVar("R", bound=Hashable)
"""The name of a replica."""
_MORE = 4
"""Sequences that the replica with the prefix may have more than the least one, at any load."""


class PrefixRouter(Generic[R]):
    """Remembers which replica has computed which beginnings of texts, as far as its cache may hold them.

    The replica with the longest common prefix is chosen if that is at least half of the prompt, and if it has
    not many more sequences than the one with the fewest: at most 4 more, or half as many again.  Otherwise
    the one with the fewest is, and of several the one with the longest prefix.  A system prompt that all
    requests share is thus computed by every replica that the load needs.

    Args:
        capacity: tokens that the cache of a replica holds.
        chunk: tokens of a chunk: a prefix counts in whole chunks, as blocks of a cache do.
    """

    def __init__(self, capacity: int, chunk: int = 16) -> None:
        self._chunk = chunk
        self._most = max(1, capacity // chunk)
        self._chunks: dict[R, OrderedDict[int, None]] = {}

    def choose(self, tokens: Sequence[int], loads: Mapping[R, int], of: Hashable = None) -> R:
        """Returns the replica for a prompt.

        Args:
            tokens: of the prompt.
            loads: unfinished sequences of the replicas that can be chosen, at least one.
            of: what computes the prompt beside the model, such as an adapter: prefixes of others do not
                count.
        """
        common = dict.fromkeys(loads, 0)
        holding = set(loads) & set(self._chunks)
        for number, chunk in enumerate(self._numbers(tokens, of), start=1):
            holding = {replica for replica in holding if chunk in self._chunks[replica]}
            if not holding:
                break
            common |= dict.fromkeys(holding, number)
        least = min(loads.values())
        best = min(loads, key=lambda replica: (-common[replica], loads[replica]))
        if 2 * self._chunk * common[best] >= len(tokens) and loads[best] <= least + max(_MORE, least // 2):
            return best
        return min(loads, key=lambda replica: (loads[replica], -common[replica]))

    def record(self, replica: R, tokens: Sequence[int], of: Hashable = None) -> None:
        """Remembers that a replica computes these tokens; those that were used longest ago are forgotten."""
        chunks = self._chunks.setdefault(replica, OrderedDict())
        for chunk in reversed(
            list(self._numbers(tokens, of))
        ):  # the beginning is used last, and kept longest
            chunks[chunk] = None
            chunks.move_to_end(chunk)
        while len(chunks) > self._most:
            chunks.popitem(last=False)

    def forget(self, replica: R | None = None) -> None:
        """Forgets the texts of a replica, or of all: their caches are empty."""
        if replica is None:
            self._chunks.clear()
        else:
            self._chunks.pop(replica, None)

    def _numbers(self, tokens: Sequence[int], of: Hashable) -> Iterator[int]:
        """Yields a number for each whole chunk, which stands for all tokens up to its end."""
        number, size = hash(of), self._chunk
        for end in range(size, len(tokens) + 1, size):
            number = hash((number, *tokens[end - size : end]))
            yield number
