"""Prompts of conversations that hold pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_armllm.engine.images.reader import PictureReader
from torch_armllm.engine.text.chat_template import render_chat
from torch_armllm.engine.text.content_format import ContentFormat

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase

    from torch_armllm.engine.text.prompt_limit import PromptLimit


def render_pictures(
    reader: PictureReader,
    tokenizer: PreTrainedTokenizerBase | None,
    messages: list[dict[str, Any]],
    pictures: list[Image],
    prompt_limit: PromptLimit | None = None,
    content_format: ContentFormat = "auto",
    **options: Any,
) -> dict[str, Any]:
    """Renders a conversation with pictures into a prompt.

    Args:
        reader: of the model's pictures.
        tokenizer: the model's.
        messages: with parts ``{"type": "image"}``.
        pictures: in the order of those parts.
        prompt_limit: bounds the text that is tokenized.
        content_format: ``auto`` and ``openai``: a content that is a text becomes a list of one part.
        options: see `render_chat`.

    Returns:
        ``{"prompt": text, "prompt_token_ids": tokens, "multi_modal_data": {"image": pictures}}``; each
        picture is still one placeholder in the tokens.

    Raises:
        ValueError: see `render_chat`; or the format has no place for pictures.
    """
    if content_format == "string":
        raise ValueError(
            "chat_template_content_format='string' has no place for pictures; give 'openai' or 'auto'"
        )
    if reader.chat_template is not None:
        options.setdefault("chat_template", reader.chat_template)
    return {
        **render_chat(tokenizer, messages, prompt_limit, "openai", **options),
        "multi_modal_data": {"image": pictures},
        "mm_processor_kwargs": {"add_special_tokens": False},  # the template has written them
    }
