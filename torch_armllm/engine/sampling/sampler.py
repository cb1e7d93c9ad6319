"""The sampler: draws the next tokens of sequences from logits."""

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
from torch_armllm.engine.sampling.batch import SamplingBatch, is_greedy
from torch_armllm.engine.sampling.batch_processors import LogitsProcessor, ProcessedBatch
from torch_armllm.engine.sampling.custom_processors import (
    AdapterLogitsProcessor,
    custom_processors,
    is_for_batches,
    is_for_requests,
)
from torch_armllm.engine.sampling.logit_processors import LogitProcessors, bad_word_token_ids
from torch_armllm.engine.sampling.logprobs import token_logprobs
from torch_armllm.engine.sampling.thinking_budget import ReasoningTokens, ThinkingBudget
from torch_armllm.engine.sampling.token_history import TokenHistory
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.structured.matcher import StructuredOutputs
from torch_armllm.engine.text.detokenizer import TokenStrings
from torch_armllm.ops.sample import best_tokens


class SampledToken(NamedTuple):
    """A sampled token, with its log-probabilities if the request wants them."""

    token_id: int
    logprobs: Logprobs | None


class _SequenceState(NamedTuple):
    """Per-sequence state that lasts from step to step."""

    processors: LogitProcessors
    history: TokenHistory


class Sampler:
    """Samples the next token of every sequence by the settings of its request.

    A row's token depends only on its logits, settings and context, never on the other rows, unless a user's
    processor of whole batches makes it.
    """

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: GenericSequence[int] = (),
        tokenizer: Any = None,
        reasoning: ReasoningTokens | None = None,
        custom: GenericSequence[AdapterLogitsProcessor | LogitsProcessor] = (),
    ) -> None:
        """Creates a sampler for a model and its tokenizer.

        Args:
            vocab_size: size of the tokenizer's vocabulary; columns of the logits from there on are never
                drawn.
            eos_token_ids: the model's EOS tokens, which `min_tokens` forbids.
            tokenizer: transformers' tokenizer, for bad words and structured outputs; None refuses both.
            reasoning: tokens around the model's reasoning; None refuses thinking budgets.
            custom: the user's logit processors.
        """
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(t for t in eos_token_ids if t < vocab_size)
        self.tokenizer = tokenizer
        self._reasoning = reasoning
        self._custom = custom
        self._for_requests: list[Any] = [each for each in custom if is_for_requests(each)]
        for_batches: list[Any] = [each for each in custom if is_for_batches(each)]
        self._whole = ProcessedBatch(for_batches) if for_batches else None
        self._texts = TokenStrings(tokenizer)
        self._structured = StructuredOutputs(tokenizer, vocab_size, self.eos_token_ids)
        # weak keys: a sequence's state goes with the sequence
        self._states: WeakKeyDictionary[Sequence, _SequenceState] = WeakKeyDictionary()
        self._batch = SamplingBatch((), ())
        self._processors: list[tuple[int, LogitProcessors]] = []
        self._logprobs: list[tuple[int, int]] = []
        self._changed = False
        self._best_only = False

    @property
    def knows_reasoning(self) -> bool:
        """True if thinking budgets can be kept."""
        return self._reasoning is not None

    def check(self, params: SamplingParams, prompt_token_ids: GenericSequence[int] = ()) -> None:
        """Refuses at submission the settings that could not be served later.

        Raises:
            ValueError: unknown token ids, bad words without tokens, an unsupported schema, regular expression
                or grammar, a thinking budget for a model whose reasoning is not known, or arguments for logit
                processors that there are not, or that refuse them.
            ImportError: structured outputs are requested and llguidance is not installed.
        """
        params.check_against_model(self.vocab_size, prompt_token_ids)
        bad_word_token_ids(params.bad_words or (), self.tokenizer)
        if params.structured_outputs is not None:
            self._structured.check(params.structured_outputs)
        if params.thinking_token_budget is not None and self._reasoning is None:
            raise ValueError(
                f"thinking_token_budget is {params.thinking_token_budget}, but it is not known how this "
                "model marks its reasoning: give the engine "
                'reasoning_config={"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}'
            )
        if params.extra_args and not self._custom:
            raise ValueError(
                f"extra_args sets {', '.join(sorted(params.extra_args))}, and no logits_processors of this "
                "engine read it: leave it out, or give the engine logits_processors"
            )
        for processor in self._custom:
            processor.validate_params(params)

    def __call__(self, logits: Tensor, sequences: GenericSequence[Sequence]) -> list[SampledToken]:
        """Samples one token per sequence.

        Args:
            logits: ``(R, V)``, one row per sequence, float32, bfloat16 or float16; float32 logits may be
                modified.
            sequences: without duplicates.
        """
        return self._draw(logits, sequences, None)

    def take_greedy(self, best: array[int], sequences: GenericSequence[Sequence]) -> list[int] | None:
        """Returns the most probable tokens if all sequences are greedy and need nothing else.

        Args:
            best: one token per sequence, the `best_tokens` of its logits.
            sequences: without duplicates.

        Returns:
            The tokens, or None if they must be sampled from the logits.
        """
        tokens = best.tolist()
        return tokens if self.needs_best_only(sequences) and -1 not in tokens else None

    def needs_best_only(self, sequences: GenericSequence[Sequence]) -> bool:
        """True if all sequences are greedy and need nothing but their most probable tokens."""
        self._gather(sequences)
        return self._best_only

    def takes_best(self, sequences: GenericSequence[Sequence]) -> bool:
        """True if the most probable token of each row is drawn: all are greedy and change no logits."""
        self._gather(sequences)
        return self._batch.plain and not self._changed

    def verify(self, logits: Tensor, sequence: Sequence) -> list[SampledToken]:
        """Returns the accepted draft tokens of a sequence and one more token.

        Every token is sampled as it would be without a draft, with the same seed and step.  A draft only
        decides for which contexts logits exist, so drafts change no output.

        Args:
            logits: ``(1 + k, V)``, after the last known token and after each of the first k draft tokens.
            sequence: its ``draft[:k]`` is verified.
        """
        return self.verify_batch(logits, [sequence], [logits.shape[0] - 1])[0]

    def verify_batch(
        self, logits: Tensor, sequences: GenericSequence[Sequence], draft_counts: GenericSequence[int]
    ) -> list[list[SampledToken]]:
        """Verifies the drafts of several sequences together; those without drafts get one token.

        Args:
            logits: ``(Σ (1 + k), V)``, the rows of all sequences, concatenated.
            sequences: in the order of their rows.
            draft_counts: k of each sequence.
        """
        if not any(draft_counts):
            return [[drawn] for drawn in self(logits, sequences)]
        rows = [a for a, k in zip(sequences, draft_counts, strict=True) for _ in range(k + 1)]
        prefixes = [a.draft[:i] for a, k in zip(sequences, draft_counts, strict=True) for i in range(k + 1)]
        sampled = self._draw(logits, rows, prefixes)
        verified, begin = [], 0
        for sequence, k in zip(sequences, draft_counts, strict=True):
            agreed = 0
            while agreed < k and sampled[begin + agreed].token_id == sequence.draft[agreed]:
                agreed += 1
            verified.append(sampled[begin : begin + agreed + 1])
            begin += k + 1
        return verified

    def draw_after(
        self,
        logits: Tensor,
        sequences: GenericSequence[Sequence],
        prefixes: list[list[int]],
        purpose: int = 0,
    ) -> list[int]:
        """Samples the token of each sequence as if ``prefixes`` had been sampled before.

        Args:
            logits: ``(R, V)``; float32 logits may be modified.
            sequences: one per row.
            prefixes: draft tokens after each sequence's own tokens.
            purpose: different purposes use independent random numbers.
        """
        return self._tokens(logits[:, : self.vocab_size], sequences, prefixes, False, purpose)

    def probabilities(
        self,
        logits: Tensor,
        sequences: GenericSequence[Sequence],
        prefixes: list[list[int]],
        keep: bool = False,
    ) -> Tensor:
        """Returns the probabilities from which `draw_after` samples, float32 ``(R, V)``.

        Args:
            logits: as for `draw_after`.
            sequences: as for `draw_after`.
            prefixes: as for `draw_after`.
            keep: leaves the logits unmodified.
        """
        return self._with_processed(
            lambda processed: self._batch.probabilities(processed, prefixes),
            logits[:, : self.vocab_size],
            sequences,
            prefixes,
            keep,
        )

    def logprobs_of(
        self, logits: Tensor, token_ids: GenericSequence[int], count: int | None
    ) -> list[SampledToken]:
        """Returns sampled tokens with ``count`` log-probabilities each, from these rows of logits."""
        if count is None:
            return [SampledToken(token, None) for token in token_ids]
        rows = logits[: len(token_ids), : self.vocab_size]
        all_logprobs = token_logprobs(rows, token_ids, [count] * len(token_ids), self._texts)
        return [
            SampledToken(token, logprobs) for token, logprobs in zip(token_ids, all_logprobs, strict=True)
        ]

    def prompt_logprobs(self, logits: Tensor, token_ids: GenericSequence[int], count: int) -> list[Logprobs]:
        """Returns the log-probabilities of prompt tokens: ``token_ids[i]`` by row i, of the token before."""
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
        rows = [i for i, _ in counts]
        selected = logits if len(rows) == len(ids) else logits[rows]
        logprobs = token_logprobs(selected, [ids[i] for i in rows], [c for _, c in counts], self._texts)
        by_row = dict(zip(rows, logprobs, strict=True))
        return [SampledToken(token, by_row.get(row)) for row, token in enumerate(ids)]

    def _tokens(
        self,
        logits: Tensor,
        sequences: GenericSequence[Sequence],
        prefixes: list[list[int]] | None,
        keep: bool,
        purpose: int = 0,
    ) -> list[int]:
        """Samples one token per row."""
        if not sequences:
            return []
        self._gather(sequences)
        if self._batch.plain and not self._changed:
            best: list[int] = best_tokens(logits).tolist()
            if -1 not in best:
                return best
        drawn: list[int] = self._with_processed(
            lambda processed: self._batch.draw(processed, prefixes, purpose),
            logits,
            sequences,
            prefixes,
            keep,
        ).tolist()
        return drawn

    def _with_processed(
        self,
        compute: Callable[[Tensor], Tensor],
        logits: Tensor,
        sequences: GenericSequence[Sequence],
        prefixes: list[list[int]] | None,
        keep: bool,
    ) -> Tensor:
        """Returns ``compute`` of the processed logits; ``keep`` leaves the given logits unmodified."""
        assert logits.shape[0] == len(sequences)
        self._gather(sequences)
        if self._changed:
            logits = logits.to(torch.float32, copy=keep)
        for row, processors in self._processors:
            processors.change(logits[row], sequences[row], () if prefixes is None else prefixes[row])
        if self._whole is not None and self._whole.changes(self._batch.greedy):
            assert prefixes is None or not any(prefixes)
            logits = self._whole.apply(logits, sequences, self._batch.greedy)
        for row, processors in self._processors:
            processors.constrain(logits[row], sequences[row], () if prefixes is None else prefixes[row])
        try:
            return compute(logits)
        except RuntimeError:
            empty = ~(logits > float("-inf")).any(-1)
            if not empty.any():
                raise
        return compute(self._force_end(logits, sequences, empty))

    def _force_end(self, logits: Tensor, sequences: GenericSequence[Sequence], empty: Tensor) -> Tensor:
        """Forces an EOS token in rows where no token is possible: all forbidden, or the logits are NaN."""
        whole = self._whole is not None and self._whole.changes(self._batch.greedy)
        processed = range(len(sequences)) if whole else {row for row, _ in self._processors}
        for row in empty.nonzero().flatten().tolist():
            if row not in processed:
                name = sequences[row].request.request_id
                warnings.warn(
                    f"the logits of request {name!r} hold no number; its sequence ends", stacklevel=2
                )
        ended = logits.clone()
        ended[empty, self.eos_token_ids[0] if self.eos_token_ids else 0] = 0.0
        return ended

    def _gather(self, sequences: GenericSequence[Sequence]) -> None:
        """Collects the settings of the sequences, unless they are those of the last batch."""
        if self._batch.sequences == sequences:
            return
        states = [self._states.get(sequence) or self._add_state(sequence) for sequence in sequences]
        self._processors = [(i, s.processors) for i, s in enumerate(states) if s.processors.any]
        self._logprobs = [
            (i, c) for i, a in enumerate(sequences) if (c := a.params.logprobs_needed) is not None
        ]
        self._batch = SamplingBatch(sequences, [s.history for s in states])
        whole = self._whole is not None and self._whole.changes(self._batch.greedy)
        self._changed = bool(self._processors) or whole
        self._best_only = self._batch.plain and not self._changed and not self._logprobs

    def _add_state(self, sequence: Sequence) -> _SequenceState:
        grammar = sequence.params.structured_outputs
        matcher = None if grammar is None else self._structured.matcher(grammar)
        params, prompt = sequence.params, sequence.request.prompt_token_ids
        budget = None
        if params.thinking_token_budget is not None and self._reasoning is not None:
            budget = ThinkingBudget(params.thinking_token_budget, self._reasoning, prompt)
        processors = LogitProcessors(
            sequence=sequence,
            vocab_size=self.vocab_size,
            eos_token_ids=self.eos_token_ids,
            tokenizer=self.tokenizer,
            matcher=matcher,
            budget=budget,
            custom=custom_processors(self._for_requests, params, is_greedy(params)),
        )
        history = TokenHistory(prompt)
        state = self._states[sequence] = _SequenceState(processors, history)
        return state
