"""Calls of tools and their results in a conversation, as a template takes them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from pydantic_core import from_json

from torch_armllm.chat_format.call_text import call_text
from torch_armllm.chat_format.format import CallFormat
from torch_armllm.chat_format.message_parts import joined, text_of
from torch_armllm.chat_format.template_traits import Message, TemplateTraits

_AS_JSON = "the chat template shows no calls of tools: earlier ones are written as JSON"
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


def settle_calls(messages: Sequence[Message], traits: TemplateTraits, warnings: list[str]) -> list[Message]:
    """Returns messages whose calls and results a template takes.

    Args:
        messages: of a conversation; the arguments of calls are texts.
        traits: of the template.
        warnings: gets a text for each change that the model sees otherwise than the client meant it.
    """
    named = _with_ids(messages, traits.short_ids)
    if traits.positional_results:
        named = _in_order(named)
    kept: list[Message] = []
    written = 0
    for turn in _turns(named):
        calls = turn[0].get("tool_calls")
        if not calls:
            kept += turn
        elif not traits.shows_calls:
            kept.append(_written_out(turn[0], traits.calls, written, warnings))
            kept += turn[1:]
            written += len(calls)
        else:
            if turn[0].get("content") and not traits.calls_beside_content:
                kept.append({name: value for name, value in turn[0].items() if name != "tool_calls"})
                turn[0] = {"role": turn[0]["role"], "content": "", "tool_calls": calls}
            kept += _one_by_one(turn) if len(calls) > 1 and not traits.several_calls else turn
    if not traits.shows_results:
        kept = _results_of_user(kept, warnings)
    return [_in_form(message, traits) for message in kept]


def _with_ids(messages: Sequence[Message], short: bool) -> list[Message]:
    """Gives ids to calls that lack one, and to results their calls' ids and names."""
    named: list[Message] = []
    names: dict[str, str] = {}
    waiting: list[str] = []
    number = 0
    for message in messages:
        if calls := message.get("tool_calls"):
            kept = []
            for call in calls:
                number += 1
                call_id = _short(call.get("id"), number) if short else call.get("id") or f"call{number:05d}"
                names[call_id] = call["function"]["name"]
                kept.append({**call, "id": call_id})
            waiting = [call["id"] for call in kept]
            message = {**message, "tool_calls": kept}
        elif message["role"] == "tool":
            given = message.get("tool_call_id")
            call_id = (_short(given, 0) if short else given) if given else (waiting[0] if waiting else "")
            if call_id in waiting:
                waiting.remove(call_id)
            message = {**message, **({"tool_call_id": call_id} if call_id else {})}
            if not message.get("name") and call_id in names:
                message["name"] = names[call_id]
        named.append(message)
    return named


def _short(given: str | None, number: int) -> str:
    """Returns an id of nine letters and digits, the same for the same id."""
    if not given:
        return f"call{number:05d}"
    if _SHORT_ID.fullmatch(given):
        return given
    return hashlib.sha256(given.encode(errors="replace")).hexdigest()[:9]


def _turns(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yields each message, and one that calls together with the results that follow it."""
    at = 0
    while at < len(messages):
        end = at + 1
        if messages[at].get("tool_calls"):
            while end < len(messages) and messages[end]["role"] == "tool":
                end += 1
        yield list(messages[at:end])
        at = end


def _in_order(messages: Sequence[Message]) -> list[Message]:
    """Sorts results by their calls."""
    ordered: list[Message] = []
    for turn in _turns(messages):
        places = {call["id"]: at for at, call in enumerate(turn[0].get("tool_calls") or ())}
        ordered.append(turn[0])
        ordered += sorted(turn[1:], key=lambda each: places.get(each.get("tool_call_id"), len(places)))
    return ordered


def _one_by_one(turn: list[Message]) -> list[Message]:
    """Returns a turn of several calls as one of a call after the other, each before its result."""
    said, *results = turn
    kept: list[Message] = []
    for at, call in enumerate(said["tool_calls"]):
        plain: Message = said if at == 0 else {"role": said["role"], "content": ""}
        kept.append({**plain, "tool_calls": [call]})
        kept += [result for result in results if result.get("tool_call_id") == call["id"]]
    ids = {call["id"] for call in said["tool_calls"]}
    return kept + [result for result in results if result.get("tool_call_id") not in ids]


def _written_out(message: Message, format: CallFormat | None, before: int, warnings: list[str]) -> Message:
    """Returns a message that has its calls in its content: in the model's format, or as JSON."""
    functions = [call["function"] for call in message["tool_calls"]]
    objects = [_object(function["arguments"] or "{}") for function in functions]
    text = None
    if format is not None and None not in objects:
        pairs = zip(functions, objects, strict=True)
        text = call_text(format, [(function["name"], value or {}) for function, value in pairs], before)
    if text is None:
        if _AS_JSON not in warnings:
            warnings.append(_AS_JSON)
        names = [json.dumps(function["name"], ensure_ascii=False) for function in functions]
        text = "\n".join(
            f'{{"name": {name}, "arguments": {function["arguments"] or "{}"}}}'
            for name, function in zip(names, functions, strict=True)
        )
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": joined(message.get("content"), text)}


def _results_of_user(messages: list[Message], warnings: list[str]) -> list[Message]:
    """Returns messages in which the results of tools are one message of the user."""
    kept: list[Message] = []
    for message in messages:
        if message["role"] != "tool":
            kept.append(message)
            continue
        name = message.get("name")
        text = f"Result of {name}:\n{text_of(message['content'])}" if name else text_of(message["content"])
        if kept and kept[-1].get("of_tools"):
            kept[-1]["content"] = joined(kept[-1]["content"], text)
        else:
            kept.append({"role": "user", "content": text, "of_tools": True})
    if any(message.pop("of_tools", False) for message in kept):
        warnings.append("the chat template shows no results of tools: they are given as messages of the user")
    return kept


def _in_form(message: Message, traits: TemplateTraits) -> Message:
    """Returns a message whose arguments and empty contents have the template's form."""
    calls = message.get("tool_calls")
    content = message.get("content")
    if not calls:
        return {**message, "content": ""} if content is None else message
    formed = [
        {**call, "function": {**call["function"], "arguments": _arguments(call, traits)}} for call in calls
    ]
    if not content and content not in traits.empty_contents:
        content = traits.empty_contents[0]
    return {**message, "content": content, "tool_calls": formed}


def _arguments(call: dict[str, Any], traits: TemplateTraits) -> Any:
    """Returns the arguments of an earlier call: most templates expect an object, clients send JSON.

    Arguments that are no object are shown as they are where the template can. Otherwise those that the token
    limit has cut off end where they are, and others are the value of a field, so that the model sees what it
    has written.
    """
    text = call["function"]["arguments"] or "{}"
    parsed = _object(text)
    if traits.arguments == "text" or (parsed is None and traits.raw_arguments):
        return text
    if parsed is not None:
        return parsed
    with suppress(ValueError):
        begun = from_json(text, allow_inf_nan=False, allow_partial="trailing-strings")
        if isinstance(begun, dict) and not _is_followed(text):
            return begun
    return {"invalid_json": text}


def _object(text: str) -> dict[str, Any] | None:
    """Returns the object that a text is as JSON, once or twice encoded; None if it is none."""
    value: Any = text
    for _ in range(2):
        if isinstance(value, str):
            with suppress(ValueError, RecursionError):
                value = json.loads(value)
    return value if isinstance(value, dict) else None


def _is_followed(text: str) -> bool:
    """True if a text begins with a whole JSON value and goes on behind it."""
    try:
        json.JSONDecoder().raw_decode(text.lstrip())
    except (ValueError, RecursionError):
        return False
    return True
