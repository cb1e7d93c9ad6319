"""A chat format in words, for operators."""

from __future__ import annotations

from typing import Any

from torch_armllm.chat_format.format import CallFormat, ChatFormat, readable

_KINDS = {
    "json": "JSON with the name and the arguments",
    "tag_json": "the name between markers, then the arguments in JSON",
    "tagged": "name, keys and values between markers; values typed by the tool's schema",
    "python": "Python: name(key=value)",
    "braces": "name{key:value}, strings between special tokens",
    "nested": "an element for each key and each item of a value",
}


def describe_format(format: ChatFormat, problem: str | None) -> dict[str, Any]:
    """Returns the properties of a format by their names.

    Args:
        format: the format.
        problem: why calls cannot be parsed; None if they can.
    """
    found: dict[str, Any] = {
        "source": "the chat template" if format.source == "derived" else f"known as {format.source}"
    }
    if format.reasoning is None:
        found["reasoning"] = "none"
    else:
        found["reasoning"] = f"{_shown(format.reasoning.begin)} … {_shown(format.reasoning.end)}"
    if format.content_begin:
        found["content"] = f"{_shown(format.content_begin)} … {_shown(format.content_end)}"
    if format.turn_end:
        found["end"] = _shown(format.turn_end)
    if problem is not None:
        found["tool calls"] = f"not understood: {problem}"
    elif format.calls is not None:
        found |= _calls(format.calls)
    return found


def _calls(calls: CallFormat) -> dict[str, Any]:
    name = "{name}"
    found: dict[str, Any] = {"tool calls": _KINDS[calls.kind]}
    if calls.section_begin or calls.section_end:
        found["all calls"] = f"{_shown(calls.section_begin)} … {_shown(calls.section_end)}"
    if calls.kind == "json":
        fields = calls.json
        found["fields"] = ", ".join(filter(None, (fields.name or "the name is the key", fields.arguments)))
        found["a call"] = f"{_shown(calls.begin)}{{…}}{_shown(calls.end)}"
    else:
        found["a call"] = f"{_shown(calls.begin)}{name}{_shown(calls.name_end)} … {_shown(calls.end)}"
    if calls.argument is not None and calls.kind == "tagged":
        argument = calls.argument
        found["an argument"] = (
            f"{_shown(argument.key_begin)}{{key}}{_shown(argument.key_end + argument.before)}{{value}}"
            f"{_shown(argument.after + argument.value_end)}"
        )
    has_ids = calls.json.id or calls.id_around_name or "\ue000" in calls.begin + calls.name_end
    found["ids"] = "the model's own" if has_ids else "made by the server"
    found["parallel calls"] = calls.parallel
    return found


def _shown(marker: str) -> str:
    return readable(marker).replace("\n", "\\n")
