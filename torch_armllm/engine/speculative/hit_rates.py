"""Rates at which copied draft tokens are right, by the length of the match that they are copied from."""

from __future__ import annotations

from torch_armllm.engine.speculative.suffix_match import LONGEST

_BOUNDS = (2, 3, 4, 6, 8, 12, 16, 24, LONGEST)
"""Longest match of each class."""
_FIRST_RATES = (0.2, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Rates before anything was observed, with the weight of `_PRIOR` observations."""
_PRIOR = 4.0
_CLASSES = [next(i for i, bound in enumerate(_BOUNDS) if length <= bound) for length in range(LONGEST + 1)]


class HitRates:
    """Counts right and wrong predictions; old ones count less and less.

    Args:
        memory: number of observations of a class after which all count half.
        parent: also counts them, and is the expectation before anything was observed here; None: constants.
    """

    def __init__(self, memory: int, parent: HitRates | None = None) -> None:
        self._memory = memory
        self._parent = parent
        self._hits = [0.0] * len(_BOUNDS)
        self._counts = [0.0] * len(_BOUNDS)
        self._rates: list[float] = list(_FIRST_RATES if parent is None else parent._rates)

    def observe(self, length: int, hit: bool) -> None:
        """Counts a prediction by a match of ``length`` tokens."""
        index = _CLASSES[length]
        expected = _FIRST_RATES[index]
        if self._parent is not None:
            self._parent.observe(length, hit)
            expected = self._parent._rates[index]
        if self._counts[index] >= self._memory:
            self._counts[index] /= 2
            self._hits[index] /= 2
        self._counts[index] += 1
        self._hits[index] += hit
        self._rates[index] = (self._hits[index] + _PRIOR * expected) / (self._counts[index] + _PRIOR)

    def rate(self, length: int) -> float:
        """Returns the expected rate of right predictions by a match of ``length`` tokens."""
        return self._rates[_CLASSES[length] if length < LONGEST else -1]
