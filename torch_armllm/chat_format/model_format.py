"""The chat format of a model: derived from its template, or named, and tried."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from torch_armllm.chat_format.aliases import TOOL_PARSERS
from torch_armllm.chat_format.derive import REASONING_TAGS
from torch_armllm.chat_format.format import ChatFormat, ReasoningFormat
from torch_armllm.chat_format.rendering import renderer, template_format, tokenizer_renderer
from torch_armllm.chat_format.trial import trial
from torch_armllm.engine.text.reasoning_tags import REASONING_PARSERS, parser_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ModelFormat:
    """The format of a model's messages.

    Attributes:
        format: the format.
        problem: why tool calls cannot be parsed; None if they can.
        keeps_reasoning: True if reasoning and its tags stay in the content.
    """

    format: ChatFormat
    problem: str | None = None
    keeps_reasoning: bool = False

    def refusal(self, remedy: str) -> str | None:
        """Returns why tools cannot be used; None if they can.

        Args:
            remedy: where a format is named, in the imperative.
        """
        if self.problem is None:
            return None
        return (
            f"this model's format of tool calls is not known: {self.problem}; leave out tools, or {remedy} "
            f"one of {', '.join(TOOL_PARSERS)}"
        )


def model_format(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
) -> ModelFormat:
    """Returns the format of a model.

    Args:
        tokenizer: the model's tokenizer.
        template: the chat template; empty: there is none.
        tool_parser: a name of `TOOL_PARSERS`; None: derived.
        reasoning_parser: one of `PARSER_NAMES`; None: derived.
    """
    if not template:
        return ModelFormat(ChatFormat(), "it has no chat template")
    format, problem = _found(tokenizer, template)
    calls = None if tool_parser is None else TOOL_PARSERS[tool_parser]
    if calls is not None:
        format, problem = replace(format, calls=calls, messages=""), None
    parser = parser_of(reasoning_parser)
    keeps = parser == "none"
    if parser is not None and not keeps:
        tags = REASONING_PARSERS[parser]
        format = replace(format, reasoning=ReasoningFormat(tags.begin, tags.end, tags.implied), messages="")
    return ModelFormat(format, problem, keeps)


def _found(tokenizer: PreTrainedTokenizerBase, template: str) -> tuple[ChatFormat, str | None]:
    from transformers import PreTrainedTokenizerBase

    tags = frozenset(REASONING_TAGS.intersection(tokenizer.get_vocab()))
    try:
        if type(tokenizer).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template:
            special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
            return _of_template(template, tuple(sorted(special.items())), tags)
        render = tokenizer_renderer(tokenizer, template)
        format = template_format(render, template, tags)
        return format, trial(format, render)
    except RuntimeError as error:  # no process for templates
        return ChatFormat(), str(error)


@lru_cache(maxsize=64)
def _of_template(
    template: str, special: tuple[tuple[str, str], ...], vocabulary: Collection[str]
) -> tuple[ChatFormat, str | None]:
    render = renderer(template, dict(special))
    format = template_format(render, template, vocabulary)
    return format, trial(format, render)
