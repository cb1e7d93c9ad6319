"""A conversation in the form that a chat template takes."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_armllm.chat_format.call_turns import settle_calls
from torch_armllm.chat_format.message_parts import in_form, joined
from torch_armllm.chat_format.system_turns import settle_turns
from torch_armllm.chat_format.template_switches import with_aliases
from torch_armllm.chat_format.template_traits import Message, TemplateTraits, with_reasoning

DATE = "%d %B %Y"
"""Form of the date for a template that cannot do without one."""
_NO_PARAMETERS = {"type": "object", "properties": {}}
_MOST_LEVELS = 8
"""Levels of objects in objects whose properties get descriptions."""


@dataclass
class Conversation:
    """The messages and variables that a template renders.

    Attributes:
        messages: in the template's form.
        variables: of the template: the tools, and those of the request.
        warnings: what the model sees otherwise than the client meant it.
    """

    messages: list[Message]
    variables: dict[str, Any]
    warnings: list[str] = field(default_factory=list)


def fit(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    traits: TemplateTraits,
    variables: Mapping[str, Any] | None = None,
    keep_contents: bool = False,
    keep_last: bool = False,
) -> Conversation:
    """Returns a conversation as a template takes it.

    Args:
        messages: in OpenAI's form: ``role``, ``content``, ``tool_calls`` with arguments as texts,
            ``tool_call_id``, ``name``, and ``reasoning``.
        tools: in OpenAI's form.
        traits: of the template.
        variables: of the template, that the request sets.
        keep_contents: True to leave texts and lists of parts as they are.
        keep_last: True to leave content and reasoning of the last message as they are.
    """
    warnings: list[str] = []
    settled = settle_calls(settle_turns(messages, traits, warnings), traits, warnings)
    if not (traits.shows_calls and traits.shows_results):  # messages of the user may follow each other now
        settled = settle_turns(settled, traits, warnings)
    given = {name: text or time.strftime(DATE) for name, text in traits.variables}
    given |= _of_tools(tools, traits, warnings)
    given |= with_aliases(variables or {}, traits.switches)
    last = settled[-1:] if keep_last else []
    fitted = [_with_reasoning(message, traits) for message in settled[: len(settled) - len(last)]]
    if not keep_contents:
        fitted = [in_form(message, traits.part_roles, traits.text_roles) for message in fitted]
    return Conversation([*fitted, *last], given, warnings)


def _with_reasoning(message: Message, traits: TemplateTraits) -> Message:
    reasoning = message.get("reasoning")
    kept = {name: value for name, value in message.items() if name != "reasoning"}
    if not reasoning or message["role"] != "assistant":
        return kept
    if kept.get("tool_calls") and kept.get("content") and not traits.reasoning_beside_calls:
        return {**kept, "content": joined(reasoning, kept["content"])}
    return with_reasoning(kept, reasoning, traits.reasoning or "reasoning_content")


def _of_tools(
    tools: Sequence[Mapping[str, Any]] | None, traits: TemplateTraits, warnings: list[str]
) -> dict[str, Any]:
    """Returns the variable of the tools, with what the template needs of each."""
    if not tools:
        return {"tools": []} if traits.needs_tool_list else {}
    if traits.tools_variable is None:
        warnings.append("the chat template shows no tools: the model does not see them")
        return {}
    filled = []
    for tool in tools:
        function = dict(tool["function"])
        if traits.needs_description and not function.get("description"):
            function["description"] = ""
        if traits.needs_parameters and not function.get("parameters"):
            function["parameters"] = _NO_PARAMETERS
        if traits.needs_details and "parameters" in function:
            function["parameters"] = _described(function["parameters"])
        filled.append({**tool, "function": function})
    return {traits.tools_variable: json.dumps(filled, indent=4) if traits.tools_as_text else filled}


def _described(schema: Any, levels: int = _MOST_LEVELS) -> Any:
    """Returns a schema in which each property has a description."""
    if not isinstance(schema, Mapping) or not levels:
        return schema
    described = dict(schema)
    if isinstance(properties := schema.get("properties"), Mapping):
        described["properties"] = {
            name: {"description": "", **_described(each, levels - 1)} if isinstance(each, Mapping) else each
            for name, each in properties.items()
        }
    if "items" in schema:
        described["items"] = _described(schema["items"], levels - 1)
    return described
