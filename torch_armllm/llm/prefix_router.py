"""The choice of the replica that computes a request: the one that holds most of its prompt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence

_CHUNK = 16
"""Tokens of a chunk: a prefix counts in whole chunks, as blocks of a cache do."""
_MORE = 4
"""Sequences that the replica with the prefix may have more than the least one, at any load."""


class PrefixRouter:
    """Remembers which replica has computed which beginnings of texts, as far as its cache may hold them.

    The replica with the longest common prefix is chosen if that is at least half of the prompt, and if it has
    not many more sequences than the one with the fewest: at most 4 more, or half as many again.  Otherwise
    the one with the fewest is, and of several the one with the longest prefix.  A system prompt that all
    requests share is thus computed by every replica that the load needs.

    Args:
        capacity: tokens that the cache of each replica holds, by the replica's number.
    """

    def __init__(self, capacity: Mapping[int, int]) -> None:
        self._most = {replica: max(1, tokens // _CHUNK) for replica, tokens in capacity.items()}
        self._chunks: dict[int, OrderedDict[int, None]] = {replica: OrderedDict() for replica in capacity}

    def choose(self, tokens: Sequence[int], loads: Mapping[int, int], of: Hashable = None) -> int:
        """Returns the number of the replica for a prompt.

        Args:
            tokens: of the prompt.
            loads: unfinished sequences of the replicas that can be chosen, at least one.
            of: what computes the prompt beside the model, such as an adapter: prefixes of others do not
                count.
        """
        common = dict.fromkeys(loads, 0)
        holding = set(loads)
        for number, chunk in enumerate(_chunks(tokens, of), start=1):
            holding = {replica for replica in holding if chunk in self._chunks[replica]}
            if not holding:
                break
            common |= dict.fromkeys(holding, number)
        least = min(loads.values())
        best = min(loads, key=lambda replica: (-common[replica], loads[replica], replica))
        if 2 * _CHUNK * common[best] >= len(tokens) and loads[best] <= least + max(_MORE, least // 2):
            return best
        return min(loads, key=lambda replica: (loads[replica], -common[replica], replica))

    def record(self, replica: int, tokens: Sequence[int], of: Hashable = None) -> None:
        """Remembers that a replica computes these tokens; those that were used longest ago are forgotten."""
        chunks = self._chunks[replica]
        for chunk in reversed(list(_chunks(tokens, of))):  # the beginning is used last, and kept longest
            chunks[chunk] = None
            chunks.move_to_end(chunk)
        while len(chunks) > self._most[replica]:
            chunks.popitem(last=False)

    def forget(self, replica: int | None = None) -> None:
        """Forgets the texts of a replica, or of all: their caches are empty."""
        for number, chunks in self._chunks.items():
            if replica in (None, number):
                chunks.clear()


def _chunks(tokens: Sequence[int], of: Hashable) -> Iterator[int]:
    """Yields a number for each whole chunk, which stands for all tokens up to its end."""
    key = hash(of)
    for end in range(_CHUNK, len(tokens) + 1, _CHUNK):
        key = hash((key, *tokens[end - _CHUNK : end]))
        yield key
