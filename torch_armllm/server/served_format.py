"""The chat format of a served model, which requests with tools need."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torch_armllm.chat_format.model_format import ModelFormat, model_format
from torch_armllm.server.errors import ApiError
from torch_armllm.server.settings import ModelSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LOGGER = logging.getLogger(__name__)


def check_tools(served: ModelFormat) -> None:
    """Checks that tool calls are understood.

    Raises:
        ApiError: they are not.
    """
    refusal = served.refusal("start the server with --tool-call-parser and")
    if refusal is not None:
        raise ApiError(400, refusal, "tools", "unknown_tool_format")


def served_format(tokenizer: PreTrainedTokenizerBase, template: str, settings: ModelSettings) -> ModelFormat:
    """Returns the format of a model that is to be served; a warning says if tools cannot be used with it.

    Args:
        tokenizer: the model's tokenizer.
        template: the chat template; empty: there is none.
        settings: may name formats of tool calls and reasoning.
    """
    found = model_format(tokenizer, template, settings.tool_parser, settings.reasoning_parser)
    if template and found.problem is not None:
        _LOGGER.warning(
            "the chat template of %s: %s; requests with tools are refused (give --tool-call-parser)",
            settings.name,
            found.problem,
        )
    return found
