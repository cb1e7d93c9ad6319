"""Messages of the system and of the developer, and turns that follow themselves, as a template takes them."""

from __future__ import annotations

from collections.abc import Sequence

from torch_armllm.chat_format.message_parts import joined
from torch_armllm.chat_format.template_traits import Message, TemplateTraits

_INSTRUCTIONS = ("system", "developer")


def settle_turns(messages: Sequence[Message], traits: TemplateTraits, warnings: list[str]) -> list[Message]:
    """Returns messages whose roles, and their order, a template takes.

    Args:
        messages: of a conversation.
        traits: of the template.
        warnings: gets a text for each change that the model sees otherwise than the client meant it.
    """
    named = [_named(message, traits) for message in messages]
    count = next((at for at, each in enumerate(named) if each["role"] not in _INSTRUCTIONS), len(named))
    leading, others = named[:count], named[count:]
    if len(leading) > 1 and not traits.shows_systems:
        content = leading[0]["content"]
        for message in leading[1:]:
            content = joined(content, message["content"])
        leading = [{**leading[0], "content": content}]
    if not traits.shows_late_system:
        others = _without_late(others, warnings)
    if leading and not traits.shows_system and leading[0]["role"] == "system":
        others = _with_leading(leading, others, warnings)
        leading = []
    return _alternating([*leading, *others], traits, warnings)


def _named(message: Message, traits: TemplateTraits) -> Message:
    role = message["role"]
    if role == "developer" and not traits.knows_developer:
        role = "system"
    if role == "function":  # the older name of a tool's result
        role = "tool"
    return {**message, "role": role, "content": message.get("content")}


def _with_leading(leading: list[Message], others: list[Message], warnings: list[str]) -> list[Message]:
    """Puts the messages of the system before the first message of the user."""
    warnings.append(
        "the chat template shows no system message: it is put before the first message of the user"
    )
    content = None
    for message in leading:
        content = joined(content, message["content"])
    first = next((at for at, message in enumerate(others) if message["role"] == "user"), None)
    if first is None:
        return [{"role": "user", "content": content}, *others]
    with_it = {**others[first], "content": joined(content, others[first]["content"])}
    return [*others[:first], with_it, *others[first + 1 :]]


def _without_late(messages: list[Message], warnings: list[str]) -> list[Message]:
    """Puts each message of the system into the message of the user beside it, or makes it one.

    It stays where it is when turns are added to the conversation, so that a prefix cache still has the tokens
    before them.
    """
    kept: list[Message] = []
    is_made = False  # the last one kept is a message of the system
    for message in _behind_results(messages):
        last = kept[-1] if kept else None
        if message["role"] in _INSTRUCTIONS:
            if last is not None and last["role"] == "user":
                kept[-1] = {**last, "content": joined(last["content"], message["content"])}
            else:
                kept.append({"role": "user", "content": message["content"]})
                is_made = True
            continue
        if is_made and last is not None and message["role"] == "user":
            kept[-1] = {**message, "content": joined(last["content"], message["content"])}
        else:
            kept.append(message)
        is_made = False
    if any(message["role"] in _INSTRUCTIONS for message in messages):
        warnings.append(
            "the chat template shows no system message between others: it is put into a message of the user"
        )
    return kept


def _behind_results(messages: Sequence[Message]) -> list[Message]:
    """Returns messages of which no one of the system parts calls from their results."""
    ordered: list[Message] = []
    for message in messages:
        at = len(ordered)
        if message["role"] == "tool":
            while at and ordered[at - 1]["role"] in _INSTRUCTIONS:
                at -= 1
        ordered.insert(at, message)
    return ordered


def _alternating(messages: list[Message], traits: TemplateTraits, warnings: list[str]) -> list[Message]:
    """Puts together messages that a template does not take one after the other."""
    kept: list[Message] = []
    for message in messages:
        role, last = message["role"], kept[-1] if kept else None
        if last is None:
            kept.append(message)
        elif role == "user" and last["role"] == "tool" and not traits.user_after_result:
            warnings.append(
                "the chat template takes no message of the user after the result of a tool: "
                "the message is added to the result"
            )
            kept[-1] = {**last, "content": joined(last["content"], message["content"])}
        elif role in ("user", "assistant") and last["role"] == role and role not in traits.repeats:
            kept[-1] = _merged(last, message)
        else:
            kept.append(message)
    return kept


def _merged(first: Message, second: Message) -> Message:
    """Returns one message that says what two of a role say."""
    merged = {**first, **second, "content": joined(first["content"], second["content"])}
    if reasoning := joined(first.get("reasoning"), second.get("reasoning")):
        merged["reasoning"] = reasoning
    if calls := [*(first.get("tool_calls") or ()), *(second.get("tool_calls") or ())]:
        merged["tool_calls"] = calls
    return merged
