"""Prompts with tools by a model's chat template, and the calls that its answers hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch_armllm.chat_format.conversation import fit
from torch_armllm.chat_format.prompt_part import begins_in
from torch_armllm.chat_format.rendering import make_parser, template_format, tokenizer_renderer
from torch_armllm.chat_format.template_switches import thinking_variables
from torch_armllm.chat_format.trait_probe import find_traits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ToolChat:
    """Renders questions with tools, and parses the answers; reasoning is off where the template has a switch.

    Args:
        tokenizer: of the model; its chat template shows tools.

    Attributes:
        format: of the model's messages.

    Raises:
        ValueError: there is no chat template, it shows no tools, or its calls are not understood.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        remedy = "give a model whose chat template takes tools"
        if not tokenizer.chat_template:
            raise ValueError(f"the model has no chat template: {remedy}")
        template = str(tokenizer.get_chat_template(tools=[{}]))
        self._render = tokenizer_renderer(tokenizer, template)
        given = partial(self._render, tools=None, add_generation_prompt=False)  # as every template gets them
        self._traits = find_traits(template, given)
        self.format = template_format(self._render, template, tokenizer.get_vocab())
        if self._traits.tools_variable is None:
            raise ValueError(f"the model's chat template shows no tools: {remedy}")
        if self.format.calls is None and not self.format.messages:
            raise ValueError(f"the calls that the model's chat template shows are not understood: {remedy}")
        shown = thinking_variables(self._traits.switches)
        self._variables = {name: not value for name, value in shown.items()}

    def prompt(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> str:
        """Returns the text of a conversation up to the model's answer."""
        fitted = fit(messages, tools, self._traits, self._variables)
        return self._render(fitted.messages, **fitted.variables, add_generation_prompt=True)

    def calls(self, prompt: str, answer: str, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
        """Returns the calls of an answer.

        Args:
            prompt: what it answers.
            answer: with special tokens.
            tools: that may be called.

        Returns:
            ``{name: {argument: value}}`` of each call; None if the arguments of one are no JSON object.
        """
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
        parser = make_parser(self.format, schemas, begins_in=begins_in(self.format, prompt))
        found = parser.feed(answer).joined(parser.finish())
        calls = []
        for call in found.calls:
            try:
                arguments = json.loads(call.arguments or "{}")
            except json.JSONDecodeError:
                return None
            if not isinstance(arguments, dict):
                return None
            calls.append({str(call.name): arguments})
        return calls
