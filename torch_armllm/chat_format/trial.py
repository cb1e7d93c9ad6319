"""The trial of a format: a call that the template renders is parsed back."""

from __future__ import annotations

import json

from torch_armllm.chat_format.format import ChatFormat
from torch_armllm.chat_format.probe import KEY, NAME, TOOLS, VALUE, Probe, Render
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
    turn = probe.calls((NAME, {KEY: VALUE}))
    if turn is None:
        return None if format.source != "derived" else "it renders no tool calls"
    if format.header and format.header in turn:
        turn = turn.partition(format.header)[2]
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    parser = make_parser(format, schemas)
    calls = [*parser.feed(turn.removeprefix(format.begun)).calls, *parser.finish().calls]
    names = [call.name for call in calls if call.name is not None]
    try:
        values = json.loads("".join(call.arguments for call in calls))
    except ValueError:
        values = None
    if names != [NAME] or values != {KEY: VALUE}:
        return "a tool call that it renders is not parsed back"
    return None
