"""Rendering of a tokenizer's chat template for its format, and the format itself."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from torch_armllm.chat_format.derive import derive
from torch_armllm.chat_format.format import ChatFormat
from torch_armllm.chat_format.known import known
from torch_armllm.chat_format.messages import MessagesParser
from torch_armllm.chat_format.parser import FormatParser, Tools
from torch_armllm.chat_format.probe import Render
from torch_armllm.engine.text.template_process import SHARED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def renderer(template: str, special_tokens: dict[str, Any] | None = None) -> Render:
    """Returns a function that renders messages with a template, in the process for templates.

    Args:
        template: the template's source.
        special_tokens: the tokenizer's, such as ``bos_token``.
    """
    special = {"bos_token": "", "eos_token": "", **(special_tokens or {})}

    def render(messages: list[dict[str, Any]], **options: Any) -> str:
        return SHARED.render(conversations=[messages], chat_template=template, **{**special, **options})

    return render


def template_format(render: Render, template: str, vocabulary: Collection[str] = ()) -> ChatFormat:
    """Returns the format of a template.

    Args:
        render: renders messages with it.
        template: its source.
        vocabulary: the tokenizer's tokens.
    """
    return known(template, derive(render, template, vocabulary))


def make_parser(format: ChatFormat, tools: Tools | None = None, **how: Any) -> FormatParser:
    """Returns a parser of an output.

    Args:
        format: the model's format.
        tools: name and JSON schema of the arguments of each tool.
        how: further arguments of `FormatParser`.
    """
    return (MessagesParser if format.messages else FormatParser)(format, tools, **how)


def marks_with(format: ChatFormat, special: Collection[str]) -> bool:
    """Returns True if a format marks reasoning or content with special tokens, which texts may leave out."""
    marks = [format.content_begin, format.content_end, "<|message|>" if format.messages else ""]
    if format.reasoning is not None:
        marks += [format.reasoning.begin, format.reasoning.end]
    return any(token in mark for token in special for mark in marks if token)


def tokenizer_renderer(tokenizer: PreTrainedTokenizerBase, template: str) -> Render:
    """Returns a function that renders messages as the server does for a tokenizer.

    A tokenizer that renders by code of its own, as that of mistral-common, does so here.
    """
    from transformers import PreTrainedTokenizerBase

    if type(tokenizer).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template:
        return renderer(template, dict(tokenizer.special_tokens_map))

    def render(messages: list[dict[str, Any]], **options: Any) -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))

    return render
