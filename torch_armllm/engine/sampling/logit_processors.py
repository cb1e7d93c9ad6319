"""What a sequence may not, must or would rather hold: changes of a row of logits before a token is drawn."""

from __future__ import annotations

from collections.abc import Sequence as GenericSequence
from typing import Any, Protocol

import torch
from torch import Tensor

from torch_armllm.engine.request import Sequence

_NEVER = float("-inf")


class Matcher(Protocol):
    """Follows a sequence through a grammar."""

    def forbidden(self, sequence: Sequence, prefix: GenericSequence[int]) -> Tensor | None:
        """Which tokens may not follow, bool ``(V,)``, or None where nothing will be drawn."""
        ...


class LogitProcessors:
    """The rules of one sequence: bias, allowed ids, bad words, least length, grammar."""

    def __init__(
        self,
        sequence: Sequence,
        vocab_size: int,
        eos_token_ids: GenericSequence[int],
        tokenizer: Any,
        matcher: Matcher | None,
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
        self._longest = max((len(word) for word in self.bad_words), default=0)
        self._forbids = bool(self.forbidden is not None or self.bad_words or self.min_tokens or matcher)

    @property
    def any(self) -> bool:
        """Whether there is any rule at all."""
        return self._forbids or self.bias is not None

    def apply(self, row: Tensor, sequence: Sequence, prefix: GenericSequence[int]) -> None:
        """Changes logits, float32 ``(V,)``, of the token behind ``prefix``, which follows the sequence's."""
        if self.bias is not None:
            row.index_add_(0, *self.bias)
        if not self._forbids:
            return
        if self.forbidden is not None:
            row.masked_fill_(self.forbidden, _NEVER)
        banned = self._banned(sequence, prefix)
        if banned:
            row.index_fill_(0, torch.tensor(banned), _NEVER)
        if self.matcher is not None:
            forbidden = self.matcher.forbidden(sequence, prefix)
            if forbidden is not None:
                row.masked_fill_(forbidden, _NEVER)

    def _banned(self, sequence: Sequence, prefix: GenericSequence[int]) -> list[int]:
        banned: list[int] = []
        if self.bad_words:
            begin = max(sequence.prompt_length, len(sequence.token_ids) - self._longest)
            tail = [*sequence.token_ids[begin:], *prefix]
            for *before, last in self.bad_words:
                if not before or tail[-len(before) :] == before:
                    banned.append(last)
        if sequence.output_length + len(prefix) < self.min_tokens:
            banned += self.eos_token_ids
        return banned


def bad_word_token_ids(words: GenericSequence[str], tokenizer: Any) -> list[list[int]]:
    """The token sequences that spell ``words``, at the begin of a text and behind a space.

    Raises:
        ValueError: there are words but no tokenizer, or a word has no tokens.
    """
    if words and tokenizer is None:
        raise ValueError("bad_words need a tokenizer, and the engine has none; use logit_bias for token ids")
    found: list[list[int]] = []
    for word in words:
        for text in (word.lstrip(), " " + word.lstrip()):
            ids = tokenizer.encode(text, add_special_tokens=False)
            if ids and ids not in found:
                found.append(ids)
            elif not ids:
                raise ValueError(f"bad_words holds {word!r}, for which the tokenizer has no tokens")
    return found
