"""Thinking budgets: limits of the tokens of reasoning, after which its end is forced."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as GenericSequence
from dataclasses import dataclass, replace
from typing import Any

from torch_armllm.engine.request import Sequence
from torch_armllm.engine.text.reasoning_tags import ReasoningTags, parser_of, reasoning_tags


@dataclass(frozen=True)
class ReasoningTokens:
    """Tokens around a model's reasoning, at least one each.

    Attributes:
        begin: before the reasoning.
        end: after reasoning that the model ends itself.
        forced: after reasoning that has used up its budget; `end`, or a phrase that leads over to it.
        implied: True if an output begins with reasoning where the prompt has not ended it.
    """

    begin: tuple[int, ...]
    end: tuple[int, ...]
    forced: tuple[int, ...]
    implied: bool = False


def find_reasoning(settings: Mapping[str, str] | None, tokenizer: Any) -> ReasoningTokens | None:
    """Returns the tokens around a model's reasoning; None if they are not known.

    Args:
        settings: `EngineConfig.reasoning_config`; None: the chat template and the vocabulary tell.
        tokenizer: transformers' tokenizer; None: there is none.

    Raises:
        ValueError: the settings name one text only, or one for which there are no tokens.
    """
    given = settings or {}
    if tokenizer is None or parser_of(given.get("reasoning_parser")) == "none":
        return None
    vocabulary = tokenizer.get_vocab()
    begin, end = given.get("reasoning_start_str"), given.get("reasoning_end_str")
    template = str(getattr(tokenizer, "chat_template", None) or "")
    tags = reasoning_tags(given.get("reasoning_parser"), template, vocabulary)
    if tags is not None and begin not in (None, tags.begin):
        tags = None
    if tags is None and (begin is None) != (end is None):
        raise ValueError(
            f"reasoning_config = {dict(given)!r}: give both reasoning_start_str and reasoning_end_str, or a "
            "reasoning_parser"
        )
    if tags is None and begin is not None and end is not None:
        tags = ReasoningTags(begin, end)
    if tags is None:
        return None

    def tokens(text: str) -> tuple[int, ...]:
        if text in vocabulary:
            return (int(vocabulary[text]),)
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    texts = tags.begin, tags.end, end or tags.end
    ids = [tokens(text) for text in texts]
    if not all(ids):
        if settings is None:
            return None
        raise ValueError(
            f"reasoning_config: the tokenizer has no tokens for {texts[ids.index(())]!r}; give another text"
        )
    return ReasoningTokens(ids[0], ids[1], ids[2], tags.implied)


class ThinkingBudget:
    """Position of one sequence in its reasoning.

    It reads the sequence's own tokens, so a sequence may be preempted, or its drafts dropped, at any time.
    Reasoning that the prompt has begun counts from there on; every further reasoning has the whole budget.

    Args:
        budget: most tokens of a reasoning, without its tags.
        tags: tokens around it.
        prompt_token_ids: of the request.
    """

    def __init__(self, budget: int, tags: ReasoningTokens, prompt_token_ids: GenericSequence[int]) -> None:
        self._budget = budget
        self._tags = tags
        self._count = 0  # output tokens that the position is after
        self._position = self._begin(prompt_token_ids)

    def forced(self, sequence: Sequence, prefix: GenericSequence[int]) -> int | None:
        """Returns the token that has to follow the sequence and ``prefix``; None: any token may."""
        new = sequence.token_ids[sequence.prompt_length + self._count :]
        self._position = self._after(self._position, new)
        self._count += len(new)
        position = self._after(self._position, prefix) if prefix else self._position
        if not position.thinking or position.length < self._budget:
            return None
        forced = self._tags.forced
        # what the model has written of it counts
        done = max(n for n in range(len(forced)) if not n or position.tail[-n:] == forced[:n])
        return forced[done]

    def _begin(self, prompt: GenericSequence[int]) -> _Position:
        """Returns the position after the prompt, which is read from its end."""
        tags = self._tags
        for end in range(len(prompt), 0, -1):
            if tuple(prompt[max(0, end - len(tags.begin)) : end]) == tags.begin:
                return self._after(_Position(thinking=True), prompt[end:])
            if tuple(prompt[max(0, end - len(tags.end)) : end]) == tags.end:
                # a template that has turned reasoning off ends with the tag and blank lines
                return _Position(thinking=tags.implied and len(prompt) - end > 2)
        return _Position(thinking=tags.implied)

    def _after(self, position: _Position, tokens: GenericSequence[int]) -> _Position:
        """Returns the position after further tokens."""
        tags, position = self._tags, replace(position)
        most = max(map(len, (tags.begin, tags.end, tags.forced)))
        for token in tokens:
            position.tail = (*position.tail, token)[-most:]
            if position.thinking:
                position.length += 1
                if _ends(position.tail, tags.end) or _ends(position.tail, tags.forced):
                    position.thinking = False
            if _ends(position.tail, tags.begin):
                position.thinking, position.length = True, 0
        return position


@dataclass
class _Position:
    """A position; `tail` is the last tokens, and `length` counts those of the reasoning."""

    thinking: bool
    length: int = 0
    tail: tuple[int, ...] = ()


def _ends(tail: tuple[int, ...], tag: tuple[int, ...]) -> bool:
    return tail[-len(tag) :] == tag
