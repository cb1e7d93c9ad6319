"""Prompts of conversations that hold pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_armllm.engine.pictures.reader import PictureReader
from torch_armllm.engine.text.chat_template import render_chat

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
    **options: Any,
) -> dict[str, Any]:
    """Renders a conversation with pictures into a prompt.

    Args:
        reader: of the model's pictures.
        tokenizer: the model's.
        messages: with parts ``{"type": "image"}``; a content that is a text becomes a list of one part.
        pictures: in the order of those parts.
        prompt_limit: bounds the text that is tokenized.
        options: see `render_chat`.

    Returns:
        ``{"prompt": text, "prompt_token_ids": tokens, "multi_modal_data": {"image": pictures}}``; each
        picture is still one placeholder in the tokens.

    Raises:
        ValueError: see `render_chat`.
    """
    if reader.chat_template is not None:
        options.setdefault("chat_template", reader.chat_template)
    listed = [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]
    return {
        **render_chat(tokenizer, listed, prompt_limit, **options),
        "multi_modal_data": {"image": pictures},
        "mm_processor_kwargs": {"add_special_tokens": False},  # the template has written them
    }
