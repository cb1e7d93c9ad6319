"""Log-probabilities, in the layouts of both routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch_armllm.engine.outputs import Logprobs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LEAST = -9999.0  # JSON has no infinity


class TokenTexts:
    """What single tokens look like."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def __call__(self, token: int) -> str:
        """A token's own text."""
        return str(self._tokenizer.decode([token]))


def chat_logprobs(
    tokens: Sequence[int], found: Sequence[Logprobs] | None, count: int, texts: TokenTexts
) -> dict[str, Any] | None:
    """Log-probabilities of a chat's answer.

    Args:
        tokens: that were drawn.
        found: at each of them; None: nobody asked.
        count: how many of the best are told.
        texts: of tokens.
    """
    if found is None:
        return None
    content = []
    for token, here in zip(tokens, found, strict=False):
        best = sorted(here, key=lambda other: here[other].rank)[:count]
        one = _one(texts(token), here[token].logprob)
        content.append({**one, "top_logprobs": [_one(texts(b), here[b].logprob) for b in best]})
    return {"content": content, "refusal": None}


def _one(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": max(logprob, _LEAST), "bytes": list(text.encode(errors="replace"))}


class CompletionLogprobs:
    """Log-probabilities of a completion, piece by piece: it counts characters.

    Args:
        count: how many of the best are told.
        texts: of tokens.
    """

    def __init__(self, count: int, texts: TokenTexts) -> None:
        self._count = count
        self._texts = texts
        self._offset = 0

    def __call__(self, tokens: Sequence[int], found: Sequence[Logprobs | None]) -> dict[str, Any]:
        """The next tokens'."""
        shown: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token, here in zip(tokens, found, strict=False):
            text = self._texts(token)
            shown["tokens"].append(text)
            shown["text_offset"].append(self._offset)
            self._offset += len(text)
            shown["token_logprobs"].append(None if here is None else max(here[token].logprob, _LEAST))
            shown["top_logprobs"].append(None if here is None else self._best(token, here))
        return shown

    def _best(self, token: int, here: Logprobs) -> dict[str, float]:
        best = sorted(here, key=lambda other: here[other].rank)[: self._count]
        kept = dict.fromkeys([*best, token])
        return {self._texts(other): max(here[other].logprob, _LEAST) for other in kept}
