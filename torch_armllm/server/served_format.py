"""The chat format of a served model: derived from its template, or named by the operator, and tried."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from torch_armllm.chat_format.aliases import TOOL_PARSERS
from torch_armllm.chat_format.derive import REASONING_TAGS
from torch_armllm.chat_format.format import ChatFormat, ReasoningFormat
from torch_armllm.chat_format.rendering import renderer, template_format, tokenizer_renderer
from torch_armllm.chat_format.trial import trial
from torch_armllm.engine.text.reasoning_tags import REASONING_PARSERS
from torch_armllm.server.errors import ApiError
from torch_armllm.server.settings import ModelSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedFormat:
    """The format of a served model's messages.

    Attributes:
        format: the format.
        problem: why tool calls cannot be parsed; None if they can.
        keeps_reasoning: True if reasoning and its tags stay in the content.
    """

    format: ChatFormat
    problem: str | None = None
    keeps_reasoning: bool = False

    def check_tools(self) -> None:
        """Checks that tool calls are understood.

        Raises:
            ApiError: they are not.
        """
        if self.problem is not None:
            raise ApiError(
                400,
                f"this model's format of tool calls is not known: {self.problem}; leave out tools, or start "
                f"the server with --tool-call-parser and one of {', '.join(TOOL_PARSERS)}",
                "tools",
                "unknown_tool_format",
            )


def served_format(tokenizer: PreTrainedTokenizerBase, template: str, settings: ModelSettings) -> ServedFormat:
    """Returns the format of a model that is to be served; a warning says if tools cannot be used with it.

    Args:
        tokenizer: the model's tokenizer.
        template: the chat template; empty: there is none.
        settings: may name formats of tool calls and reasoning.
    """
    if not template:
        return ServedFormat(ChatFormat(), "it has no chat template")
    format, problem = _found(tokenizer, template)
    if settings.tool_parser is not None:
        format, problem = replace(format, calls=TOOL_PARSERS[settings.tool_parser], messages=""), None
    keeps = settings.reasoning_parser == "none"
    if settings.reasoning_parser is not None and not keeps:
        tags = REASONING_PARSERS[settings.reasoning_parser]
        format = replace(format, reasoning=ReasoningFormat(tags.begin, tags.end, tags.implied), messages="")
    if problem is not None:
        _LOGGER.warning(
            "the chat template of %s: %s; requests with tools are refused (give --tool-call-parser)",
            settings.name,
            problem,
        )
    return ServedFormat(format, problem, keeps)


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
