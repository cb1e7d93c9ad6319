"""Rendering of conversations into prompts by chat templates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_armllm.engine.text.content_format import ContentFormat, in_content_format
from torch_armllm.engine.text.template_process import SHARED
from torch_armllm.system.panics import PANICS_AS_ERRORS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from torch_armllm.engine.text.prompt_limit import PromptLimit

NOT_VARIABLES = frozenset(
    {
        *("conversation", "conversations", "tokenizer", "chat_template", "tokenize", "tokenizer_kwargs"),
        *("padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "sanitize_control_tokens"),
    }
)
"""Names of transformers' own options, which a template cannot have as variables."""


def render_chat(
    tokenizer: PreTrainedTokenizerBase | None,
    conversation: list[dict[str, Any]],
    prompt_limit: PromptLimit | None = None,
    content_format: ContentFormat = "auto",
    **options: Any,
) -> dict[str, Any]:
    """Renders a conversation into a prompt.

    Templates run in a process of their own, which bounds their time, memory and output.  A tokenizer that
    renders conversations by code of its own, as that of mistral-common, does so here, without bounds.

    Args:
        tokenizer: provides the template, unless ``chat_template`` is given.
        conversation: messages with ``role`` and ``content``.
        prompt_limit: bounds the text that is tokenized.
        content_format: form of the contents that the template reads; see `in_content_format`.
        options: of `transformers.PreTrainedTokenizerBase.apply_chat_template`.

    Returns:
        ``{"prompt": text, "prompt_token_ids": tokens}``.

    Raises:
        ValueError: there is no tokenizer or no template; or the template rejects the conversation, or
            exceeds a bound.
    """
    if tokenizer is None:
        raise ValueError("there is no tokenizer: give one, or use generate with prompt_token_ids")
    if not options.get("chat_template") and not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template; give chat_template, or use generate")
    if refused := sorted(NOT_VARIABLES & set(options) - {"chat_template"}):
        raise ValueError(
            f"chat_template_kwargs sets {', '.join(refused)}; give variables of the template only"
        )
    template = str(options.get("chat_template") or tokenizer.chat_template)
    messages = [
        {name: part for name, part in message.items() if part is not None}
        for message in in_content_format(conversation, content_format, template)
    ]
    text = chat_text(tokenizer, messages, **options)
    return tokenized_chat(tokenizer, text, prompt_limit)


def chat_text(tokenizer: PreTrainedTokenizerBase, conversation: list[dict[str, Any]], **options: Any) -> str:
    """Renders messages as they are into the text of a prompt.

    Args:
        tokenizer: has the template, unless ``chat_template`` is given.
        conversation: messages in the form that the template reads.
        options: see `render_chat`.

    Raises:
        ValueError: the template rejects the conversation, or exceeds a bound.
    """
    try:
        return _render(tokenizer, conversation, options)
    except (ValueError, RuntimeError):
        raise
    except Exception as error:  # Jinja's own errors, and any other that a template raises
        raise ValueError(f"the chat template refuses this conversation: {error}") from error


def tokenized_chat(
    tokenizer: PreTrainedTokenizerBase, text: str, prompt_limit: PromptLimit | None = None
) -> dict[str, Any]:
    """Returns the prompt of a rendered conversation.

    Raises:
        ValueError: the text is too long.
    """
    if prompt_limit is not None:
        prompt_limit.check(len(text))
    with PANICS_AS_ERRORS:
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]  # the template has written them
    return {"prompt": text, "prompt_token_ids": list(tokens)}


def _render(
    tokenizer: PreTrainedTokenizerBase, conversation: list[dict[str, Any]], options: dict[str, Any]
) -> str:
    """Does as ``apply_chat_template(tokenize=False)`` does, with the template in another process."""
    from transformers import PreTrainedTokenizerBase
    from transformers.utils import get_json_schema

    if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
        return str(tokenizer.apply_chat_template(conversation, tokenize=False, **options))
    if not conversation:
        raise ValueError("the conversation is empty: give at least one message")
    if options.get("continue_final_message") and options.get("add_generation_prompt"):
        raise ValueError(
            "continue_final_message and add_generation_prompt exclude each other: the one continues the last "
            "message, the other begins a reply"
        )
    tools = options.pop("tools", None)
    template = tokenizer.get_chat_template(options.pop("chat_template", None), tools)
    return SHARED.render(
        conversations=[conversation],
        chat_template=template,
        tools=tools and [get_json_schema(tool) if callable(tool) else tool for tool in tools],
        **{**tokenizer.special_tokens_map, **options},
    )
