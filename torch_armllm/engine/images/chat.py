"""Prompts of conversations that hold images, sound or videos."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch_armllm.engine.images.media_places import marks_of, placed
from torch_armllm.engine.images.reader import PictureReader
from torch_armllm.engine.text.chat_template import render_chat
from torch_armllm.engine.text.content_format import ContentFormat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from torch_armllm.engine.text.prompt_limit import PromptLimit


def render_media(
    reader: PictureReader,
    tokenizer: PreTrainedTokenizerBase | None,
    messages: list[dict[str, Any]],
    media: Mapping[str, list[Any]],
    prompt_limit: PromptLimit | None = None,
    content_format: ContentFormat = "auto",
    **options: Any,
) -> dict[str, Any]:
    """Renders a conversation with images, sound or videos into a prompt.

    Args:
        reader: of the model's media.
        tokenizer: the model's.
        messages: with parts ``{"type": "image"}``, ``{"type": "audio"}`` and ``{"type": "video"}``.
        media: by modality, in the order of those parts.
        prompt_limit: bounds the text that is tokenized.
        content_format: ``auto`` and ``openai``: a content that is a text becomes a list of one part.
        options: see `render_chat`.

    Returns:
        ``{"prompt": text, "prompt_token_ids": tokens, "multi_modal_data": media}``; each of them is still one
        placeholder in the tokens.

    Raises:
        ValueError: see `render_chat`; or the format has no place for media.
    """
    if content_format == "string":
        raise ValueError(
            "chat_template_content_format='string' has no place for images, sound and videos; give 'openai' "
            "or 'auto'"
        )
    if reader.chat_template is not None:
        options.setdefault("chat_template", reader.chat_template)
    template, tokens = _template(tokenizer, options)
    shown = placed(messages, template, tokens, marks_of(reader.processor))
    return {
        **render_chat(tokenizer, shown.messages, prompt_limit, shown.content_format, **options),
        "multi_modal_data": media,
        "mm_processor_kwargs": {"add_special_tokens": False},  # the template has written them
    }


def _template(tokenizer: Any, options: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Returns the text of the template and its tokens; nothing if the tokenizer renders by its own code."""
    from transformers import PreTrainedTokenizerBase

    if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
        return "", {}
    given = options.get("chat_template") or tokenizer.chat_template
    if not given:
        return "", {}
    return str(tokenizer.get_chat_template(options.get("chat_template"), None)), tokenizer.special_tokens_map
