"""Logit processors: changes of a row of logits before its token is sampled."""

from __future__ import annotations

from collections.abc import Sequence as GenericSequence
from typing import Any, Protocol

import torch
from torch import Tensor

from torch_armllm.engine.request import Sequence
from torch_armllm.engine.sampling.custom_processors import CustomProcessor
from torch_armllm.engine.sampling.thinking_budget import ThinkingBudget

_NEVER = float("-inf")


class Matcher(Protocol):
    """A grammar's state for one sequence."""

    def forbidden(self, sequence: Sequence, prefix: GenericSequence[int]) -> Tensor:
        """Returns the tokens that may not follow the sequence and ``prefix``, bool ``(V,)``."""
        ...


class LogitProcessors:
    """Logit processors of one sequence: bias, allowed ids, bad words, minimum length, the user's, grammar.

    Args:
        sequence: the sequence.
        vocab_size: number of logits.
        eos_token_ids: forbidden before the minimum length.
        tokenizer: of the bad words; None: there are none.
        matcher: of the grammar; None: there is none.
        budget: forces the end of reasoning, whatever the others say; None: there is none.
        custom: the user's own.
    """

    def __init__(
        self,
        sequence: Sequence,
        vocab_size: int,
        eos_token_ids: GenericSequence[int],
        tokenizer: Any,
        matcher: Matcher | None,
        budget: ThinkingBudget | None = None,
        custom: GenericSequence[CustomProcessor] = (),
    ) -> None:
        params = sequence.params
        self.bias: tuple[Tensor, Tensor] | None = None
        if params.logit_bias:
            ids = [token for token in params.logit_bias if token < vocab_size]
            self.bias = (
                torch.tensor(ids),
                torch.tensor([params.logit_bias[i] for i in ids], dtype=torch.float32),
            )
        self.forbidden: Tensor | None = None
        if params.allowed_token_ids is not None:
            allowed = torch.tensor([t for t in params.allowed_token_ids if t < vocab_size], dtype=torch.int64)
            self.forbidden = torch.ones(vocab_size, dtype=torch.bool).index_fill_(0, allowed, False)
        words = bad_word_token_ids(params.bad_words or (), tokenizer)
        self.bad_words = [word for word in words if max(word) < vocab_size]
        self.min_tokens = params.min_tokens
        self.eos_token_ids = sorted({*eos_token_ids, *(params.stop_token_ids or ())})
        self.matcher = matcher
        self._max_word_length = max((len(word) for word in self.bad_words), default=0)
        self._budget = budget
        self._custom = custom
        self._forbids = bool(self.forbidden is not None or self.bad_words or self.min_tokens)

    @property
    def any(self) -> bool:
        """True if any processor changes logits."""
        always = self.matcher is not None or self._budget is not None or self._custom
        return bool(always or self._forbids or self.bias is not None)

    def change(self, row: Tensor, sequence: Sequence, prefix: GenericSequence[int]) -> None:
        """Changes logits, float32 ``(V,)``, of the token after the sequence and ``prefix``, in place."""
        if self.bias is not None:
            row.index_add_(0, *self.bias)
        if self._forbids:
            self._forbid(row, sequence, prefix)
        for processor in self._custom:
            processor.apply(row, sequence, prefix)

    def constrain(self, row: Tensor, sequence: Sequence, prefix: GenericSequence[int]) -> None:
        """Leaves the tokens that may follow whatever the logits are; arguments are those of `change`."""
        if self._budget is not None and (forced := self._budget.forced(sequence, prefix)) is not None:
            row.fill_(_NEVER)
            row[forced] = 0.0
        elif self.matcher is not None:
            row.masked_fill_(self.matcher.forbidden(sequence, prefix), _NEVER)

    def _forbid(self, row: Tensor, sequence: Sequence, prefix: GenericSequence[int]) -> None:
        if self.forbidden is not None:
            row.masked_fill_(self.forbidden, _NEVER)
        banned = self._banned(sequence, prefix)
        if banned:
            row.index_fill_(0, torch.tensor(banned), _NEVER)

    def _banned(self, sequence: Sequence, prefix: GenericSequence[int]) -> list[int]:
        banned: list[int] = []
        if self.bad_words:
            begin = max(sequence.prompt_length, len(sequence.token_ids) - self._max_word_length)
            tail = [*sequence.token_ids[begin:], *prefix]
            for *before, last in self.bad_words:
                if not before or tail[-len(before) :] == before:
                    banned.append(last)
        if sequence.output_length + len(prefix) < self.min_tokens:
            banned += self.eos_token_ids
        return banned


def bad_word_token_ids(words: GenericSequence[str], tokenizer: Any) -> list[list[int]]:
    """Returns the token sequences that spell ``words``, at the start of a text and after a space.

    Raises:
        ValueError: words are given but there is no tokenizer, or a word has no tokens.
    """
    if words and tokenizer is None:
        raise ValueError("bad_words need a tokenizer, and the engine has none; use logit_bias for token ids")
    sequences: list[list[int]] = []
    for word in words:
        for text in (word.lstrip(), " " + word.lstrip()):
            ids = tokenizer.encode(text, add_special_tokens=False)
            if ids and ids not in sequences:
                sequences.append(ids)
            elif not ids:
                raise ValueError(f"bad_words holds {word!r}, for which the tokenizer has no tokens")
    return sequences
