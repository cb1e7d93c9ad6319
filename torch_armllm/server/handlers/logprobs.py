"""Log-probabilities in the formats of the chat and completions routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch_armllm.engine.outputs import Logprob, Logprobs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MIN_LOGPROB = -9999.0  # JSON has no infinity


class TokenDecoder:
    """Decodes single tokens.

    Args:
        tokenizer: of the model.
        as_ids: True to write them as ``token_id:42``.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def __call__(self, token: int) -> str:
        """Returns a token's own text."""
        if self._as_ids:
            return f"token_id:{token}"
        return str(self._tokenizer.decode([token]))


def prompt_logprobs(
    found: Sequence[Logprobs | None] | None, count: int | None
) -> list[dict[str, Any] | None] | None:
    """Returns log-probabilities of a prompt's tokens in vLLM's format: by token id, None for the first token.

    Args:
        found: those that were computed.
        count: number of most likely tokens to list at each position, besides its own; None: not requested.
    """
    if count is None or found is None:
        return None
    listed: list[dict[str, Any] | None] = []
    for candidates in found:
        if candidates is None:
            listed.append(None)
            continue
        tokens = dict.fromkeys([next(iter(candidates)), *_best(candidates, count)])  # its own comes first
        listed.append({str(token): _prompt_entry(candidates[token]) for token in tokens})
    return listed


def _prompt_entry(found: Logprob) -> dict[str, Any]:
    return {**found._asdict(), "logprob": max(found.logprob, _MIN_LOGPROB)}


def chat_logprobs(
    tokens: Sequence[int], logprobs: Sequence[Logprobs] | None, top: int, decode: TokenDecoder
) -> dict[str, Any] | None:
    """Returns log-probabilities in the format of the chat route.

    Args:
        tokens: the sampled token ids.
        logprobs: log-probabilities at each of them; None if not requested.
        top: number of most likely tokens to list at each position.
        decode: decodes single tokens.
    """
    if logprobs is None:
        return None
    content = []
    for token, candidates in zip(tokens, logprobs, strict=False):
        best = _best(candidates, top)
        entry = _entry(decode(token), candidates[token].logprob)
        content.append({**entry, "top_logprobs": [_entry(decode(b), candidates[b].logprob) for b in best]})
    return {"content": content, "refusal": None}


def _best(candidates: Logprobs, count: int) -> list[int]:
    """Returns the most probable tokens, the best first."""
    return sorted(candidates, key=lambda token: candidates[token].rank or len(candidates))[:count]


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {
        "token": text,
        "logprob": max(logprob, _MIN_LOGPROB),
        "bytes": list(text.encode(errors="replace")),
    }


class CompletionLogprobs:
    """Formats log-probabilities of a streamed completion; counts characters for ``text_offset``.

    Args:
        top: number of most likely tokens to list at each position.
        decode: decodes single tokens.
    """

    def __init__(self, top: int, decode: TokenDecoder) -> None:
        self._top = top
        self._decode = decode
        self._offset = 0

    def __call__(self, tokens: Sequence[int], logprobs: Sequence[Logprobs | None]) -> dict[str, Any]:
        """Returns log-probabilities of the next tokens in the format of the completions route."""
        result: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token, candidates in zip(tokens, logprobs, strict=False):
            text = self._decode(token)
            result["tokens"].append(text)
            result["text_offset"].append(self._offset)
            self._offset += len(text)
            logprob = None if candidates is None else max(candidates[token].logprob, _MIN_LOGPROB)
            result["token_logprobs"].append(logprob)
            result["top_logprobs"].append(None if candidates is None else self._best(token, candidates))
        return result

    def _best(self, token: int, candidates: Logprobs) -> dict[str, float]:
        listed = dict.fromkeys([*_best(candidates, self._top), token])
        return {self._decode(other): max(candidates[other].logprob, _MIN_LOGPROB) for other in listed}
