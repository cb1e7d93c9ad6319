"""Drafts where they are expected to save time, by measured acceptance and measured costs."""

from __future__ import annotations

from collections.abc import Sequence as GenericSequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch_armllm.engine.request import Sequence
from torch_armllm.engine.speculative.hit_rates import HitRates
from torch_armllm.engine.speculative.step_costs import MAX_DRAFTED, StepCosts
from torch_armllm.engine.speculative.suffix_match import SuffixMatch

MAX_DRAFT_TOKENS = 16
"""Most draft tokens of a sequence."""
MAX_SEQUENCES = 16
"""Most sequences that draft: with more, a token costs its share of a step anyway."""
_LEAST_RATE = 0.05
"""Least probability of a draft token to be accepted."""
_MARGIN = 1.1
"""Least expected gain, in tokens per second, of a draft: the best of many estimates is too good."""
_LOOK_EVERY = 4
"""Steps from one look at several sequences to the next, while none drafts: a look takes its time, too."""
_PATIENCE = 4
"""Draft tokens without a gain after which no more are considered: tiles of rows make costs uneven."""
_PLAIN_EVERY = 32
"""Steps with draft tokens after which two go without, to know the time of the second."""
_SEQUENCE_MEMORY, _ENGINE_MEMORY = 32, 512


@dataclass
class _State:
    rates: HitRates
    match: SuffixMatch = field(default_factory=SuffixMatch)


class AdaptiveDrafts:
    """Chooses draft lengths that maximize the expected number of tokens per second.

    Draft tokens are copied from after the last earlier occurrence of a sequence's end.  Each token that is
    sampled shows whether the copy would have been right, so rates are known without drafting, and a sequence
    that does not repeat itself costs nothing but that comparison.
    """

    chooses_lengths = True

    def __init__(self) -> None:
        self.costs = StepCosts()
        self._rates = HitRates(_ENGINE_MEMORY)
        self._states: WeakKeyDictionary[Sequence, _State] = WeakKeyDictionary()
        self._since_plain = 0
        self._since_draft = 0

    def probabilities(self, sequence: Sequence) -> None:
        """Returns None: these drafts are not sampled."""

    def record_step(self, sequences: int, drafted: int, seconds: float) -> None:
        """Records the time of a step without prompt tokens."""
        self.costs.record(sequences, drafted, seconds)

    def propose(self, sequences: GenericSequence[Sequence], counts: GenericSequence[int]) -> list[list[int]]:
        """Returns one draft per sequence, of at most ``counts`` tokens; drafts may be empty."""
        none: list[list[int]] = [[] for _ in sequences]  # keep this path short: most steps draft nothing
        if not 0 < len(sequences) <= MAX_SEQUENCES:
            return none
        self._since_draft += 1
        if len(sequences) > 1 and self._since_draft > _LOOK_EVERY and self._since_draft % _LOOK_EVERY:
            return none
        states = [self._follow(sequence) for sequence in sequences]
        curve = self.costs.curve(len(sequences))
        if curve is None:
            return none
        lengths = _lengths(states, counts, curve) if any(state.match.length for state in states) else None
        if lengths is None:
            self._since_plain = 0
            return none
        self._since_plain += 1
        self._since_draft = 0
        if self._since_plain > _PLAIN_EVERY:
            if self._since_plain == _PLAIN_EVERY + 2:
                self._since_plain = 0
            return none
        return [
            state.match.draft(sequence.token_ids, length) if length else []
            for sequence, state, length in zip(sequences, states, lengths, strict=True)
        ]

    def _follow(self, sequence: Sequence) -> _State:
        state = self._states.get(sequence)
        if state is None:
            state = self._states[sequence] = _State(HitRates(_SEQUENCE_MEMORY, self._rates))
        state.match.follow(sequence.token_ids, sequence.prompt_length, state.rates.observe)
        return state


def _lengths(
    states: GenericSequence[_State], limits: GenericSequence[int], curve: GenericSequence[float]
) -> list[int] | None:
    """Returns the draft lengths with the most expected tokens per time; None: drafts save too little.

    Args:
        states: of the sequences.
        limits: most draft tokens of each.
        curve: relative times of steps with 0, 1, … draft tokens.
    """
    sequences = len(states)
    counts = [0] * sequences
    best, best_counts = _MARGIN * sequences, None
    top, since_top, expected = float(sequences), 0, float(sequences)
    next_rates = [
        state.rates.rate(state.match.length) if state.match.length and limit > 0 else 0.0
        for state, limit in zip(states, limits, strict=True)
    ]
    for drafted in range(1, MAX_DRAFTED + 1):
        probability = max(next_rates)
        if probability < _LEAST_RATE:
            break
        chosen = next_rates.index(probability)
        counts[chosen] += 1
        expected += probability
        gain = expected / curve[drafted]
        if gain > top:
            top, since_top = gain, 0
            if gain > best:
                best, best_counts = gain, counts[:]
        elif (since_top := since_top + 1) == _PATIENCE:
            break
        state, count = states[chosen], counts[chosen]
        more = count < min(limits[chosen], MAX_DRAFT_TOKENS)
        next_rates[chosen] = probability * state.rates.rate(state.match.length + count) if more else 0.0
    return best_counts
