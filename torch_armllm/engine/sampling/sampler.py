"""From logits to the next tokens of sequences."""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Callable
from collections.abc import Sequence as GenericSequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from torch_armllm.engine.outputs import Logprobs
from torch_armllm.engine.request import Sequence
from torch_armllm.engine.sampling.batch import SamplingBatch
from torch_armllm.engine.sampling.logit_processors import LogitProcessors, bad_word_token_ids
from torch_armllm.engine.sampling.logprobs import token_logprobs
from torch_armllm.engine.sampling.structured import StructuredOutputs
from torch_armllm.engine.sampling.token_history import TokenHistory
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.text.detokenizer import TokenStrings
from torch_armllm.ops.sample import best_tokens


class SampledToken(NamedTuple):
    """A token that was drawn."""

    token_id: int
    logprobs: Logprobs | None


class _Known(NamedTuple):
    """What is kept of a sequence from step to step."""

    rules: LogitProcessors
    history: TokenHistory


class Sampler:
    """Draws the next token of every sequence, each by its own request's settings.

    A row's token depends on its logits, its settings and its text alone, never on the other rows.

    Attributes:
        greedy_only: whether the sequences that were drawn for last took their most probable tokens, and
            nothing else.
    """

    def __init__(
        self, vocab_size: int, eos_token_ids: GenericSequence[int] = (), tokenizer: Any = None
    ) -> None:
        """Draws among ``vocab_size`` tokens.

        Args:
            vocab_size: ids from there on are never drawn: what a model has beyond its tokenizer.
            eos_token_ids: the model's own end tokens, which `min_tokens` keeps away.
            tokenizer: transformers' tokenizer, for bad words and structured outputs; None: they are refused.
        """
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(t for t in eos_token_ids if t < vocab_size)
        self.tokenizer = tokenizer
        self._texts = TokenStrings(tokenizer)
        self._structured = StructuredOutputs(tokenizer, vocab_size, self.eos_token_ids)
        # weak: a sequence that nobody else knows any more takes what is kept of it along
        self._known: WeakKeyDictionary[Sequence, _Known] = WeakKeyDictionary()
        self._batch = SamplingBatch((), ())
        self._rules: list[tuple[int, LogitProcessors]] = []
        self._logprobs: list[tuple[int, int]] = []
        self.greedy_only = False

    def check(self, params: SamplingParams, prompt_token_ids: GenericSequence[int] = ()) -> None:
        """Refuses at submission what could not be drawn later.

        Raises:
            ValueError: token ids that the model does not have, bad words without tokens, or a schema, regular
                expression or grammar that cannot be followed.
            ImportError: structured outputs are asked for and llguidance is not installed.
        """
        params.check_against_model(self.vocab_size, prompt_token_ids)
        bad_word_token_ids(params.bad_words or (), self.tokenizer)
        if params.structured_outputs is not None:
            self._structured.check(params.structured_outputs)

    def __call__(self, logits: Tensor, sequences: GenericSequence[Sequence]) -> list[SampledToken]:
        """One token a sequence.

        Args:
            logits: ``(R, V)`` with a row for each of ``sequences``, float32, bfloat16 or float16; float32
                ones may be changed.
            sequences: may not hold the same one twice.
        """
        return self._draw(logits, sequences, None)

    def take_greedy(self, best: array[int], sequences: GenericSequence[Sequence]) -> list[int] | None:
        """The most probable tokens, where that is what all sequences take.

        Args:
            best: a token for each sequence, by `best_tokens` of its logits.
            sequences: may not hold the same one twice.

        Returns:
            None: they have to be drawn by their logits.
        """
        if self._batch.sequences != sequences:
            self._gather(sequences)
        tokens = best.tolist()
        return tokens if self.greedy_only and -1 not in tokens else None

    def verify(self, logits: Tensor, sequence: Sequence) -> list[SampledToken]:
        """The tokens that follow a sequence, as many as its draft foretold, and one more.

        Every token is drawn as it would be without a draft, with the same seed and step, and the draft only
        tells for which texts logits are there: so drafts change no output.

        Args:
            logits: ``(1 + k, V)``, behind the last known token and behind each of the draft's first k.
            sequence: what is verified is ``sequence.draft[:k]``.
        """
        return self.verify_batch(logits, [sequence], [logits.shape[0] - 1])[0]

    def verify_batch(
        self, logits: Tensor, sequences: GenericSequence[Sequence], draft_counts: GenericSequence[int]
    ) -> list[list[SampledToken]]:
        """`verify` for several sequences in one go; those with no drafts get one token.

        Args:
            logits: ``(Σ (1 + k), V)``, the rows of all sequences one behind the other.
            sequences: in the order of their rows.
            draft_counts: k of each.
        """
        if not any(draft_counts):
            return [[drawn] for drawn in self(logits, sequences)]
        rows = [a for a, k in zip(sequences, draft_counts, strict=True) for _ in range(k + 1)]
        prefixes = [a.draft[:i] for a, k in zip(sequences, draft_counts, strict=True) for i in range(k + 1)]
        every = self._draw(logits, rows, prefixes)
        found, begin = [], 0
        for sequence, k in zip(sequences, draft_counts, strict=True):
            agreed = 0
            while agreed < k and every[begin + agreed].token_id == sequence.draft[agreed]:
                agreed += 1
            found.append(every[begin : begin + agreed + 1])
            begin += k + 1
        return found

    def draw_after(
        self,
        logits: Tensor,
        sequences: GenericSequence[Sequence],
        prefixes: list[list[int]],
        purpose: int = 0,
    ) -> list[int]:
        """The token that each sequence would get by these logits, had it got ``prefixes`` before.

        Args:
            logits: ``(R, V)``; float32 ones may be changed.
            sequences: one a row.
            prefixes: tokens behind each sequence's own.
            purpose: draws of another one have other random numbers.
        """
        return self._tokens(logits[:, : self.vocab_size], sequences, prefixes, False, purpose)

    def probabilities(
        self,
        logits: Tensor,
        sequences: GenericSequence[Sequence],
        prefixes: list[list[int]],
        keep: bool = False,
    ) -> Tensor:
        """What `draw_after` draws each token with, by all of the sequences' settings: float32 ``(R, V)``.

        Args:
            logits: as for `draw_after`.
            sequences: as for `draw_after`.
            prefixes: as for `draw_after`.
            keep: leaves the logits as they are.
        """
        return self._by_rules(
            lambda ruled: self._batch.probabilities(ruled, prefixes),
            *(logits[:, : self.vocab_size], sequences, prefixes, keep),
        )

    def logprobs_of(
        self, logits: Tensor, token_ids: GenericSequence[int], count: int | None
    ) -> list[SampledToken]:
        """Tokens that were drawn by these rows of logits, with as many log-probabilities as are wanted."""
        if count is None:
            return [SampledToken(token, None) for token in token_ids]
        rows = logits[: len(token_ids), : self.vocab_size]
        found = token_logprobs(rows, token_ids, [count] * len(token_ids), self._texts)
        return [SampledToken(token, logprobs) for token, logprobs in zip(token_ids, found, strict=True)]

    def prompt_logprobs(self, logits: Tensor, token_ids: GenericSequence[int], count: int) -> list[Logprobs]:
        """Of tokens of a prompt: ``token_ids[i]`` by row i of ``logits``, that of the token before it."""
        return token_logprobs(logits[:, : self.vocab_size], token_ids, [count] * len(token_ids), self._texts)

    def _draw(
        self, logits: Tensor, sequences: GenericSequence[Sequence], prefixes: list[list[int]] | None
    ) -> list[SampledToken]:
        if logits.shape[1] != self.vocab_size:
            logits = logits[:, : self.vocab_size]
        self._gather(sequences)
        counts = self._logprobs
        ids = self._tokens(logits, sequences, prefixes, keep=bool(counts))
        if not counts:
            return [SampledToken(token, None) for token in ids]
        which = [i for i, _ in counts]
        wanted = logits if len(which) == len(ids) else logits[which]
        found = token_logprobs(wanted, [ids[i] for i in which], [c for _, c in counts], self._texts)
        by_row = dict(zip(which, found, strict=True))
        return [SampledToken(token, by_row.get(row)) for row, token in enumerate(ids)]

    def _tokens(
        self,
        logits: Tensor,
        sequences: GenericSequence[Sequence],
        prefixes: list[list[int]] | None,
        keep: bool,
        purpose: int = 0,
    ) -> list[int]:
        """Tokens, one a row."""
        if not sequences:
            return []
        self._gather(sequences)
        if self._batch.plain and not self._rules:
            best: list[int] = best_tokens(logits).tolist()
            if -1 not in best:
                return best
        drawn: list[int] = self._by_rules(
            lambda ruled: self._batch.draw(ruled, prefixes, purpose), logits, sequences, prefixes, keep
        ).tolist()
        return drawn

    def _by_rules(
        self,
        compute: Callable[[Tensor], Tensor],
        logits: Tensor,
        sequences: GenericSequence[Sequence],
        prefixes: list[list[int]] | None,
        keep: bool,
    ) -> Tensor:
        """What ``compute`` makes of the logits by the sequences' rules; they stay as they are if ``keep``."""
        assert logits.shape[0] == len(sequences)
        self._gather(sequences)
        if self._rules:
            logits = logits.to(torch.float32, copy=keep)
        for row, rules in self._rules:
            rules.apply(logits[row], sequences[row], () if prefixes is None else prefixes[row])
        try:
            return compute(logits)
        except RuntimeError:
            closed = ~(logits > float("-inf")).any(-1)
            if not closed.any():
                raise
        return compute(self._ended(logits, sequences, closed))

    def _ended(self, logits: Tensor, sequences: GenericSequence[Sequence], closed: Tensor) -> Tensor:
        """Lets an end token follow where nothing may: by all rules together, or where a model fails."""
        ruled = {row for row, _ in self._rules}
        for row in closed.nonzero().flatten().tolist():
            if row not in ruled:
                name = sequences[row].request.request_id
                warnings.warn(f"the logits of request {name!r} hold no number: its answer ends", stacklevel=2)
        ended = logits.clone()
        ended[closed, self.eos_token_ids[0] if self.eos_token_ids else 0] = 0.0
        return ended

    def _gather(self, sequences: GenericSequence[Sequence]) -> None:
        """Puts the sequences' settings together; the same sequences as before have the same."""
        if self._batch.sequences == sequences:
            return
        known = [self._known.get(sequence) or self._learn(sequence) for sequence in sequences]
        self._rules = [(i, k.rules) for i, k in enumerate(known) if k.rules.any]
        self._logprobs = [
            (i, c) for i, a in enumerate(sequences) if (c := a.params.logprobs_needed) is not None
        ]
        self._batch = SamplingBatch(sequences, [k.history for k in known])
        self.greedy_only = self._batch.plain and not self._rules and not self._logprobs

    def _learn(self, sequence: Sequence) -> _Known:
        asked = sequence.params.structured_outputs
        matcher = None if asked is None else self._structured.matcher(asked)
        rules = LogitProcessors(sequence, self.vocab_size, self.eos_token_ids, self.tokenizer, matcher)
        known = self._known[sequence] = _Known(rules, TokenHistory(sequence.request.prompt_token_ids))
        return known
