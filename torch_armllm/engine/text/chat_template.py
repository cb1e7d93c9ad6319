"""Rendering of conversations into prompts by chat templates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def render_chat(
    tokenizer: PreTrainedTokenizerBase | None, conversation: list[dict[str, Any]], **options: Any
) -> dict[str, Any]:
    """Renders a conversation into a prompt.

    Args:
        tokenizer: provides the template, unless ``chat_template`` is given.
        conversation: messages with ``role`` and ``content``.
        options: of `transformers.PreTrainedTokenizerBase.apply_chat_template`.

    Returns:
        ``{"prompt": text, "prompt_token_ids": tokens}``.

    Raises:
        ValueError: there is no tokenizer or no template, or the template rejects the conversation.
    """
    if tokenizer is None:
        raise ValueError("there is no tokenizer: give one, or use generate with prompt_token_ids")
    if not options.get("chat_template") and not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template; give chat_template, or use generate")
    try:
        text = tokenizer.apply_chat_template(conversation, tokenize=False, **options)
    except ValueError:
        raise
    except Exception as error:  # Jinja's own errors, and any other that a template raises
        raise ValueError(f"the chat template refuses this conversation: {error}") from error
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]  # the template has written them
    return {"prompt": text, "prompt_token_ids": list(tokens)}
