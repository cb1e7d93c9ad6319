"""Messages that probe a chat template, made of words that no template writes by itself."""

from __future__ import annotations

import json
from typing import Any

from torch_armllm.chat_format.template_traits import ArgumentForm, Message

ROLE = "vqrole1"
USER, SYSTEM, SAID, RESULT = "vquser1", "vqsystem1", "vqsaid1", "vqresult1"
MORE, THOUGHT, NAME, KEY = "vqmore2", "vqthought1", "vqname1", "vqkey1"
VALUE, OTHER_VALUE, OTHER_RESULT = "vqvalue1", "vqvalue2", "vqresult2"
LONG_IDS, SHORT_IDS = ("call_vqid00000001", "call_vqid00000002"), ("vqidentA1", "vqidentB2")
USER_TURN: Message = {"role": "user", "content": USER}


def tools_variable(name: str, as_text: bool, without: str = "") -> dict[str, Any]:
    """Returns the variable of a tool, of which a field may be missing."""
    properties = {KEY: {"type": "string", "description": KEY}}
    if without == "details":  # of its parameter
        del properties[KEY]["description"]
    function = {
        "name": NAME,
        "description": MORE,
        "parameters": {"type": "object", "properties": properties, "required": [KEY]},
    }
    function.pop(without, None)
    tools = [{"type": "function", "function": function}]
    return {name: json.dumps(tools) if as_text else tools}


def call(form: ArgumentForm, call_id: str, value: str = VALUE) -> dict[str, Any]:
    """Returns a call, whose one argument is a value."""
    arguments = {KEY: value}
    given = arguments if form == "object" else json.dumps(arguments)
    return {"id": call_id, "type": "function", "function": {"name": NAME, "arguments": given}}


def calling(calls: list[dict[str, Any]], content: str | None) -> Message:
    """Returns a message that calls."""
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(text: str, call_id: str) -> Message:
    """Returns the result of a call."""
    return {"role": "tool", "tool_call_id": call_id, "name": NAME, "content": text}


def turn_of(role: str, content: Any, calls: Message | None) -> list[Message]:
    """Returns a conversation in which a role has a content."""
    message: Message = {"role": role, "content": content}
    if role == "user":
        return [message]
    if role == "system":
        return [message, USER_TURN]
    if role == "assistant":
        return [USER_TURN, message]
    if calls is None:
        return [USER_TURN, {"role": "assistant", "content": ""}, {**message, "tool_call_id": LONG_IDS[0]}]
    (call,) = calls["tool_calls"]
    return [USER_TURN, calls, {**message, "tool_call_id": call["id"], "name": NAME}]
