"""Costs of decode steps with draft tokens, relative to those without."""

from __future__ import annotations

MAX_DRAFTED = 32
"""Most draft tokens of a step."""
_WEIGHT = 0.2
"""Weight of the latest step in a mean."""
_LEAST_STEPS = 3
"""Steps without draft tokens before any are drafted."""
_FIXED = 7
"""A step of n tokens costs about as much as n + 7, until it was measured."""
_FORGETTING = 0.005
"""Share of what was measured that a step without draft tokens takes back."""
_SURPRISE = 1.5
"""Most that a step may take of what was expected; what is more is an interruption."""
_BOUNDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, MAX_DRAFTED)
"""Most draft tokens of each class of steps."""
_CLASSES = [0] + [
    next(i for i, bound in enumerate(_BOUNDS) if drafted <= bound) for drafted in range(1, MAX_DRAFTED + 1)
]


class _Costs:
    """Costs of steps with one number of sequences."""

    def __init__(self, sequences: int) -> None:
        self.steps = 0  # without draft tokens
        self.plain = 0.0  # mean seconds of those
        estimates = [(_FIXED + sequences + bound) / (_FIXED + sequences) for bound in _BOUNDS]
        self.estimates, self.ratios = estimates, estimates[:]
        self.curve = [1.0] * (MAX_DRAFTED + 1)
        self.draw()

    def draw(self) -> None:
        """Draws the curve of the cost over the draft tokens through the classes' ratios."""
        low, low_ratio = 0, 1.0
        for bound, ratio in zip(_BOUNDS, self.ratios, strict=True):
            for drafted in range(low + 1, bound + 1):
                self.curve[drafted] = low_ratio + (ratio - low_ratio) * (drafted - low) / (bound - low)
            low, low_ratio = bound, ratio

    def record_drafted(self, drafted: int, seconds: float) -> None:
        """Records a step with draft tokens."""
        expected = self.curve[drafted]
        change = _WEIGHT * (max(1.0, min(seconds / self.plain, _SURPRISE * expected)) - expected)
        at = _CLASSES[drafted]
        for near, share in ((at - 1, 0.3), (at, 1.0), (at + 1, 0.3)):
            if 0 <= near < len(_BOUNDS):
                self.ratios[near] = max(1.0, self.ratios[near] + share * change)
        self.draw()


class StepCosts:
    """Learns from the times of steps how much draft tokens add.

    Contexts grow and machines get slower or faster, so times are compared with those of recent steps that had
    the same number of sequences and no draft tokens.  A step with draft tokens also pays for what the next
    one has to prepare anew.
    """

    def __init__(self) -> None:
        self._last: tuple[_Costs, int, float] | None = None  # the last step, if it had draft tokens
        self._costs: dict[int, _Costs] = {}  # by number of sequences

    def record(self, sequences: int, drafted: int, seconds: float) -> None:
        """Records a decode step of ``sequences`` tokens and ``drafted`` draft tokens."""
        costs = self._costs.get(sequences)
        if costs is None:
            costs = self._costs[sequences] = _Costs(sequences)
        last, self._last = self._last, None
        if last is not None:
            before, count, time = last
            same = before is costs and not drafted
            before.record_drafted(count, time + (max(0.0, seconds - costs.plain) if same else 0.0))
        if drafted:
            if costs.steps:
                self._last = costs, drafted, seconds
            return
        if last is not None:
            return
        costs.steps += 1
        if costs.steps == 1:
            costs.plain = seconds
        elif costs.steps <= _LEAST_STEPS:
            costs.plain = min(costs.plain, seconds)  # the first step of a kind allocates memory
        else:
            costs.plain += _WEIGHT * (min(seconds, _SURPRISE * costs.plain) - costs.plain)
        if costs.steps % 16 == 0:
            ratios, estimates = costs.ratios, costs.estimates
            costs.ratios = [a + 16 * _FORGETTING * (b - a) for a, b in zip(ratios, estimates, strict=True)]
            costs.draw()

    def curve(self, sequences: int) -> list[float] | None:
        """Returns the expected time of a step with 0, 1, … draft tokens, relative to one without.

        None: too few steps of ``sequences`` tokens were timed to compare with.
        """
        costs = self._costs.get(sequences)
        return None if costs is None or costs.steps < _LEAST_STEPS else costs.curve
