"""The trial of a format: a call that the template renders is parsed back."""

from __future__ import annotations

import json

from torch_armllm.chat_format.format import ChatFormat
from torch_armllm.chat_format.probe import KEY, KEY2, NAME, OTHER, TOOLS, VALUE, Probe, Render
from torch_armllm.chat_format.rendering import make_parser


def trial(format: ChatFormat, render: Render) -> str | None:
    """Returns why tool calls of a format cannot be parsed; None if they can.

    A template that renders no calls, and whose format is written down, is not tried.

    Args:
        format: the format.
        render: renders messages with the template.
    """
    if format.calls is None:
        return "it renders no tool calls"
    probe = Probe(render)
    if probe.calls((NAME, {KEY: VALUE})) is None:
        return None if format.source != "derived" else "it renders no tool calls"
    for name, key in ((NAME, KEY), (OTHER, KEY2)):
        if not _is_read(format, probe, name, key):
            return "a tool call that it renders is not parsed back"
    return None


def _is_read(format: ChatFormat, probe: Probe, name: str, key: str) -> bool:
    """True if a call that is rendered is parsed, and nothing of it stays in the content."""
    turn = probe.calls((name, {key: VALUE})) or ""
    if format.header and format.header in turn:
        turn = turn.partition(format.header)[2]
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    parser = make_parser(format, schemas)
    got = parser.feed(turn.removeprefix(format.begun)).joined(parser.finish())
    try:
        values = [json.loads(call.arguments) for call in got.calls]
    except ValueError:
        return False
    return (
        [call.name for call in got.calls] == [name] and values == [{key: VALUE}] and name not in got.content
    )
