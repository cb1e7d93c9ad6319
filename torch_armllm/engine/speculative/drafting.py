"""Drafts for the engine's steps, and how many of them came true."""

from __future__ import annotations

from collections.abc import Sequence as GenericSequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

from torch import Tensor

from torch_armllm.engine.request import Sequence, Status
from torch_armllm.engine.sampling.batch import philox_counter, sequence_seed
from torch_armllm.engine.sampling.sampler import SampledToken, Sampler
from torch_armllm.engine.speculative.rejection import INSTEAD, STAY, accept
from torch_armllm.ops.sample import philox_uniform


class Proposer(Protocol):
    """What guesses tokens."""

    def propose(self, sequences: GenericSequence[Sequence], counts: GenericSequence[int]) -> list[list[int]]:
        """Tokens that may follow each sequence, at most so many as its count, or none."""
        ...

    def probabilities(self, sequence: Sequence) -> Tensor | None:
        """What the tokens of a sequence's draft were drawn with, ``(k, V)``; None where they were not drawn.

        Drafts without are verified by drawing what would be drawn anyway, those with by rejection sampling.
        """
        ...


@dataclass
class Acceptance:
    """How good the guesses are.

    Attributes:
        drafts: how many were verified.
        drafted: their tokens.
        accepted: those that were drawn indeed.
    """

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def rate(self) -> float:
        """Part of the drafted tokens that were accepted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_length(self) -> float:
        """Tokens that a step with a draft brings, the one that it draws anyway included."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0


class SpeculativeDecoder:
    """Gives running sequences drafts, verifies them, and counts what becomes of them.

    Args:
        proposer: guesses the tokens.
        sampler: draws those that are right.
        most: tokens of a draft.
    """

    def __init__(self, proposer: Proposer, sampler: Sampler, most: int) -> None:
        self.proposer = proposer
        self.sampler = sampler
        self.most = most
        self.acceptance = Acceptance()
        # A token more makes a step a tenth longer, so that guesses must be right now and then to be worth it.
        self._hopes: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()

    def propose(self, sequences: GenericSequence[Sequence]) -> None:
        """Sets ``draft`` of sequences that have just got a token; finished ones are left alone."""
        going = [a for a in sequences if a.status is not Status.FINISHED and a.finish_reason is None]
        drafts = self.proposer.propose(going, [self._room(a) for a in going])
        for sequence, draft in zip(going, drafts, strict=True):
            assert len(draft) <= self.most
            sequence.draft = draft

    def verify(
        self, logits: Tensor, sequences: GenericSequence[Sequence], draft_counts: GenericSequence[int]
    ) -> list[list[SampledToken]]:
        """The tokens that follow sequences: of each draft as many as it foretold, and one more.

        Args:
            logits: ``(Σ (1 + k), V)``: behind a sequence's last known token and behind its draft's first k,
                the rows of all sequences one behind the other.
            sequences: in the order of their rows.
            draft_counts: k of each; may be 0.
        """
        proposed = [
            self.proposer.probabilities(sequence) if count else None
            for sequence, count in zip(sequences, draft_counts, strict=True)
        ]
        if all(p is None for p in proposed):
            found = self.sampler.verify_batch(logits, sequences, draft_counts)
        else:
            rows = logits.split([count + 1 for count in draft_counts])
            found = [
                self._one(own, sequence, count, drawn_with)
                for own, sequence, count, drawn_with in zip(
                    rows, sequences, draft_counts, proposed, strict=True
                )
            ]
        for sequence, drafted, drawn in zip(sequences, draft_counts, found, strict=True):
            if drafted:
                self._note(sequence, drafted, len(drawn) - 1)
        return found

    def _one(
        self, logits: Tensor, sequence: Sequence, count: int, proposed: Tensor | None
    ) -> list[SampledToken]:
        if proposed is None:
            return self.sampler.verify_batch(logits, [sequence], [count])[0]
        draft, length = sequence.draft[:count], sequence.output_length
        seed = sequence_seed(sequence.request.seed, sequence.index)
        prefixes = [draft[:i] for i in range(count + 1)]
        wanted = sequence.params.logprobs_needed
        kept = logits if wanted is None else logits.clone()
        target = self.sampler.probabilities(logits[:count], [sequence] * count, prefixes[:count])

        def uniform(place: int, instead: bool) -> float:
            return philox_uniform(seed, philox_counter(length + place, INSTEAD if instead else STAY))

        stay, token = accept(draft, proposed[:count], target, uniform)
        if token is None:
            (token,) = self.sampler.draw_after(logits[count:], [sequence], [draft])
        return self.sampler.logprobs_of(kept, [*draft[:stay], token], wanted)

    def _note(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        self.acceptance.drafts += 1
        self.acceptance.drafted += drafted
        self.acceptance.accepted += accepted
        self._hopes[sequence] = min(self.most, 2 * drafted) if accepted == drafted else accepted + 1

    def _room(self, sequence: Sequence) -> int:
        """How many tokens to guess: twice as many as were right, or one more than were."""
        hope = self._hopes.get(sequence, min(2, self.most))
        limit = sequence.params.max_tokens
        # a step draws one token anyway
        return hope if limit is None else max(0, min(hope, limit - sequence.output_length - 1))
