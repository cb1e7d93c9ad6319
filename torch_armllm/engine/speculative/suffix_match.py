"""The last earlier occurrence of a sequence's end, from which draft tokens are copied."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as GenericSequence

LONGEST = 32
"""Longest match that is told apart from longer ones, in tokens."""
_BITS = 32  # of a token id in a key


class SuffixMatch:
    """Follows the earlier occurrence of a growing sequence's last tokens.

    The last two and four tokens are looked up in dictionaries; while the tokens that follow are those of the
    earlier occurrence, the match grows, and nothing is looked up.  A token costs the same however long the
    sequence is.

    Attributes:
        length: number of last tokens that occurred before, at most `LONGEST`; 0: no match.
    """

    def __init__(self) -> None:
        self.length = 0
        self._source = 0  # position of the token that followed the earlier occurrence
        self._pairs: dict[int, int] = {}
        self._fours: dict[int, int] = {}
        self._known = 0  # tokens that were followed
        self._four = 0  # key of the last four tokens

    def follow(
        self, tokens: GenericSequence[int], prompt_length: int, observe: Callable[[int, bool], None]
    ) -> None:
        """Follows new tokens, and reports for each output token whether the match predicted it.

        Args:
            tokens: those of the last call, possibly with more tokens appended.
            prompt_length: number of prompt tokens, which are not reported.
            observe: gets the length of the match, and True if it predicted the token.
        """
        for position in range(self._known, len(tokens)):
            token = tokens[position]
            if self.length:
                hit = tokens[self._source] == token
                if position >= prompt_length:
                    observe(self.length, hit)
                if hit:
                    self._source += 1
                    self.length = min(self.length + 1, LONGEST)
                else:
                    self.length = 0
            self._four = four = (self._four << _BITS | token) & (1 << 4 * _BITS) - 1
            pair = four & (1 << 2 * _BITS) - 1
            end = position + 1
            if position >= 1:
                if self.length < 4:
                    source = self._fours.get(four) or self._pairs.get(pair)
                    if source is not None and position >= prompt_length - 1:
                        self._source, self.length = source, _common_length(tokens, source, end)
                self._pairs[pair] = end
                if position >= 3:
                    self._fours[four] = end
        self._known = len(tokens)

    def draft(self, tokens: GenericSequence[int], count: int) -> list[int]:
        """Returns the ``count`` tokens that followed the earlier occurrence, which `length` must not lack."""
        draft = list(tokens[self._source : self._source + count])
        while len(draft) < count:  # the occurrence overlaps the end: it goes on periodically
            draft.append(draft[self._source - len(tokens)])
        return draft


def _common_length(tokens: GenericSequence[int], first: int, second: int) -> int:
    """Returns how many tokens before two positions are the same, at most `LONGEST`."""
    length = 0
    while length < min(first, LONGEST) and tokens[first - 1 - length] == tokens[second - 1 - length]:
        length += 1
    return length
