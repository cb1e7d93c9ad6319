"""Conversations as texts, in the form that the model's chat template takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch_armllm.chat_format.continuation import continued
from torch_armllm.chat_format.conversation import Conversation, fit
from torch_armllm.chat_format.template_traits import Message, TemplateTraits
from torch_armllm.chat_format.trait_probe import traits_of
from torch_armllm.engine.text.chat_template import chat_text, render_chat
from torch_armllm.engine.text.content_format import ContentFormat, in_content_format

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ChatInput:
    """A conversation, and what a request asks of its prompt.

    Attributes:
        messages: in OpenAI's form, with ``reasoning``.
        tools: in OpenAI's form.
        variables: of the template.
        begins: True to begin a message of the assistant.
        continues: True to continue the last message.
    """

    messages: list[Message]
    tools: list[dict[str, Any]]
    variables: Mapping[str, Any]
    begins: bool = True
    continues: bool = False


class ChatRenderer:
    """Renders conversations by the model's chat template, whose traits are found when they are first needed.

    Args:
        tokenizer: the model's tokenizer.
        chat_template: replaces the tokenizer's own template.
        content_format: form of the contents that the template reads.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chat_template: str | None, content_format: ContentFormat
    ) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._content_format = content_format

    def template(self, has_tools: bool = False) -> str:
        """Returns the template's text; empty if there is none, or the tokenizer renders by its own code."""
        from transformers import PreTrainedTokenizerBase

        if type(self._tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
            return ""
        if not (self._chat_template or self._tokenizer.chat_template):
            return ""
        return str(self._tokenizer.get_chat_template(self._chat_template, [{}] if has_tools else None))

    def traits(self, has_tools: bool = False) -> TemplateTraits:
        """Returns the traits of the template.

        Args:
            has_tools: True for those of the template for conversations with tools, where there are two.
        """
        template = self.template(has_tools)
        if not template:
            return TemplateTraits()
        tokens = self._tokenizer.special_tokens_map.items()
        return traits_of(template, tuple((name, text) for name, text in tokens if isinstance(text, str)))

    def fitted(self, given: ChatInput, keep_contents: bool = False) -> Conversation:
        """Returns a conversation as the template takes it."""
        kept = keep_contents or self._content_format != "auto"
        traits = self.traits(bool(given.tools))
        return fit(given.messages, given.tools, traits, given.variables, kept)

    def render(self, given: ChatInput) -> tuple[str, list[str]]:
        """Renders a conversation; returns its text, and what the model sees otherwise than it was sent.

        Raises:
            ValueError: there is no template, or it rejects the conversation.
        """
        if not self.template(bool(given.tools)):
            return self._by_tokenizer(given)
        if not given.continues:
            conversation = self.fitted(given)
            text = self._text(conversation.messages, conversation.variables, given.begins)
            return text, conversation.warnings
        traits = self.traits(bool(given.tools))
        kept = self._content_format != "auto"
        conversation = fit(given.messages, given.tools, traits, given.variables, kept, keep_last=True)

        def render(messages: Sequence[Message], begins: bool) -> str:
            return self._text(list(messages), conversation.variables, begins)

        prompt = continued(conversation.messages, traits, render)
        if prompt.drops_reasoning:
            conversation.warnings.append(
                "the chat template knows no reasoning: that of the last message is left out"
            )
        return prompt.text, conversation.warnings

    def _text(self, messages: list[Message], variables: Mapping[str, Any], begins: bool) -> str:
        if self._content_format != "auto":
            messages = in_content_format(messages, self._content_format, "")
        options: dict[str, Any] = {**variables, "add_generation_prompt": begins}
        if self._chat_template is not None:
            options["chat_template"] = self._chat_template
        return chat_text(self._tokenizer, messages, **options)

    def _by_tokenizer(self, given: ChatInput) -> tuple[str, list[str]]:
        """Renders by the tokenizer's own code; refuses where there is none."""
        conversation = self.fitted(given, keep_contents=True)
        options = {
            **conversation.variables,
            "add_generation_prompt": given.begins and not given.continues,
            "continue_final_message": given.continues,
        }
        prompt = render_chat(self._tokenizer, conversation.messages, None, self._content_format, **options)
        return str(prompt["prompt"]), conversation.warnings
