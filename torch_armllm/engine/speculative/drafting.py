"""Drafting and verification of tokens in the engine's steps, with acceptance statistics."""

from __future__ import annotations

from collections.abc import Sequence as GenericSequence
from dataclasses import dataclass
from typing import Protocol, cast
from weakref import WeakKeyDictionary

from torch import Tensor

from torch_armllm.engine.request import Sequence, Status
from torch_armllm.engine.sampling.batch import philox_counter, sequence_seed
from torch_armllm.engine.sampling.sampler import SampledToken, Sampler
from torch_armllm.engine.scheduling.step import Step
from torch_armllm.engine.speculative.rejection import ACCEPT, RESAMPLE, accept
from torch_armllm.ops.sample import philox_uniform


class Proposer(Protocol):
    """A source of draft tokens.

    Attributes:
        chooses_lengths: True if it chooses the lengths of drafts itself, up to the counts given.
    """

    chooses_lengths: bool

    def propose(self, sequences: GenericSequence[Sequence], counts: GenericSequence[int]) -> list[list[int]]:
        """Returns one draft per sequence, of at most ``counts`` tokens; drafts may be empty."""
        ...

    def probabilities(self, sequence: Sequence) -> Tensor | None:
        """Returns the distributions ``(k, V)`` from which a draft was sampled; None if it was not sampled.

        Drafts with distributions are verified by rejection sampling, others by comparison with the sampled
        tokens.
        """
        ...

    def record_step(self, sequences: int, drafted: int, seconds: float) -> None:
        """Records the time of a step of ``sequences`` tokens and ``drafted`` draft tokens, and no others."""
        ...


class HiddenReader(Proposer, Protocol):
    """A source of draft tokens that computes them from the model's own hidden states."""

    def read(self, step: Step, hidden: Tensor) -> None:
        """Takes the rows ``(T, columns)`` of all tokens of a computed step; `propose` is called next."""
        ...


@dataclass
class Acceptance:
    """Acceptance statistics of draft tokens.

    Attributes:
        drafts: number of verified drafts.
        drafted: number of their tokens.
        accepted: number of accepted tokens.
    """

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def rate(self) -> float:
        """Fraction of the draft tokens that were accepted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_length(self) -> float:
        """Mean number of tokens per step with a draft, including the token that it samples anyway."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0


class SpeculativeDecoder:
    """Drafts tokens for running sequences, verifies them, and counts the accepted ones.

    Args:
        proposer: source of the drafts.
        sampler: samples the tokens that drafts are verified against.
        max_draft_tokens: most tokens per draft.
        kv_bytes: bytes of the proposer's own cache.
    """

    def __init__(
        self, proposer: Proposer, sampler: Sampler, max_draft_tokens: int, kv_bytes: int = 0
    ) -> None:
        self.proposer = proposer
        self.sampler = sampler
        self.max_draft_tokens = max_draft_tokens
        self.kv_bytes = kv_bytes
        self.acceptance = Acceptance()
        # Each draft token makes a step about 10 % longer, so draft lengths follow the recent acceptance.
        self._draft_lengths: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()

    def propose(
        self, sequences: GenericSequence[Sequence], step: Step | None = None, hidden: Tensor | None = None
    ) -> None:
        """Sets ``draft`` of sequences that have just received a token; skips finished sequences.

        Args:
            sequences: received a token.
            step: that was computed.
            hidden: `StepResult.hidden` of the step.
        """
        if hidden is not None:
            assert step is not None
            cast(HiddenReader, self.proposer).read(step, hidden)
        running = [s for s in sequences if s.status is not Status.FINISHED and s.finish_reason is None]
        drafts = self.proposer.propose(running, [self._draft_length(s) for s in running])
        for sequence, draft in zip(running, drafts, strict=True):
            assert len(draft) <= self.max_draft_tokens
            sequence.draft = draft

    def verify(
        self, logits: Tensor, sequences: GenericSequence[Sequence], draft_counts: GenericSequence[int]
    ) -> list[list[SampledToken]]:
        """Returns for each sequence its accepted draft tokens and one more token.

        Args:
            logits: ``(Σ (1 + k), V)``: after a sequence's last known token and after each of its first k
                draft tokens; the rows of all sequences, concatenated.
            sequences: in the order of their rows.
            draft_counts: k of each sequence; may be 0.
        """
        proposed = [
            self.proposer.probabilities(sequence) if count else None
            for sequence, count in zip(sequences, draft_counts, strict=True)
        ]
        if all(p is None for p in proposed):
            verified = self.sampler.verify_batch(logits, sequences, draft_counts)
        else:
            rows = logits.split([count + 1 for count in draft_counts])
            verified = [
                self._verify_one(own_rows, sequence, count, distributions)
                for own_rows, sequence, count, distributions in zip(
                    rows, sequences, draft_counts, proposed, strict=True
                )
            ]
        for sequence, drafted, tokens in zip(sequences, draft_counts, verified, strict=True):
            if drafted:
                self._record(sequence, drafted, len(tokens) - 1)
        return verified

    def verify_greedy(self, sequence: Sequence, best: list[int]) -> list[int]:
        """Returns the accepted draft tokens of a greedy sequence and one more token.

        Args:
            sequence: has a draft of k tokens.
            best: the most probable token after the last known token and after each draft token, k + 1.
        """
        count, agreed = len(best) - 1, 0
        while agreed < count and best[agreed] == sequence.draft[agreed]:
            agreed += 1
        if count:
            self._record(sequence, count, agreed)
        return best[: agreed + 1]

    def record_time(self, step: Step, seconds: float) -> None:
        """Records the duration of a step."""
        if step.only_extends:
            self.proposer.record_step(len(step.scheduled), step.num_draft, seconds)

    def _verify_one(
        self, logits: Tensor, sequence: Sequence, count: int, proposed: Tensor | None
    ) -> list[SampledToken]:
        if proposed is None:
            return self.sampler.verify_batch(logits, [sequence], [count])[0]
        draft, length = sequence.draft[:count], sequence.output_length
        seed = sequence_seed(sequence.request.seed, sequence.index)
        prefixes = [draft[:i] for i in range(count + 1)]
        num_logprobs = sequence.params.logprobs_needed
        original = logits if num_logprobs is None else logits.clone()
        target = self.sampler.probabilities(logits[:count], [sequence] * count, prefixes[:count])

        def uniform(position: int, resample: bool) -> float:
            return philox_uniform(seed, philox_counter(length + position, RESAMPLE if resample else ACCEPT))

        accepted, token = accept(draft, proposed[:count], target, uniform)
        if token is None:
            (token,) = self.sampler.draw_after(logits[count:], [sequence], [draft])
        return self.sampler.logprobs_of(original, [*draft[:accepted], token], num_logprobs)

    def _record(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        self.acceptance.drafts += 1
        self.acceptance.drafted += drafted
        self.acceptance.accepted += accepted
        if self.proposer.chooses_lengths:
            return
        self._draft_lengths[sequence] = (
            min(self.max_draft_tokens, 2 * drafted) if accepted == drafted else accepted + 1
        )

    def _draft_length(self, sequence: Sequence) -> int:
        """Returns the next draft length: twice the last if all was accepted, else one more than accepted."""
        length = self.max_draft_tokens
        if not self.proposer.chooses_lengths:
            length = self._draft_lengths.get(sequence, min(2, length))
        limit = sequence.params.max_tokens
        # a step samples one token anyway
        return length if limit is None else max(0, min(length, limit - sequence.output_length - 1))
