"""Targets: mutated outputs of models in all formats of calls, and mutated chat templates.

An output is split into the same reasoning, content and calls in pieces of any size; calls are of the tools.
A template has a format that parses its own call, or it is said why it has none.
"""

from __future__ import annotations

import random
import time
from typing import Any

from tests.chat_format.templates import SAMPLES
from torch_armllm.chat_format.aliases import TOOL_PARSERS
from torch_armllm.chat_format.deltas import OutputDelta
from torch_armllm.chat_format.format import ChatFormat, ReasoningFormat
from torch_armllm.chat_format.known import CALLS
from torch_armllm.chat_format.rendering import make_parser, renderer, template_format
from torch_armllm.chat_format.trial import trial

_SECONDS = 2.0
_TOOLS: dict[str, Any] = {
    "f": {"type": "object", "properties": {"a": {"type": "string"}, "o": {"type": "object"}}},
    "g": {"properties": {"n": {"type": ["integer", "null"]}, "l": {"items": {"type": "string"}}}},
    "</tool_call>": None,
    "[": {"type": "object"},
}
_NOISE = [
    "f",
    "g",
    "(",
    ")",
    "[",
    "]",
    "{",
    "}",
    '"',
    "'",
    "\\",
    ",",
    ":",
    "=",
    "\n",
    " ",
    "é",
    "\ud800",
    "7",
]
_NOISE += ["<think>", "</think>", '"name": "f"', '"arguments": ', "None", "true", "```json", "\x00", "a" * 50]


class Finding(AssertionError):
    """An output that is parsed in two ways, or a call of no tool."""


def run(seed: int) -> None:
    """Parses one mutated output."""
    chosen = random.Random(seed)
    name = chosen.choice([*(name for name, calls in TOOL_PARSERS.items() if calls), "harmony", "muse"])
    format = ChatFormat(
        reasoning=ReasoningFormat("<think>", "</think>", repeats=chosen.random() < 0.2),
        calls=TOOL_PARSERS.get(name) or CALLS[name],
        header="<|start|>assistant",
        turn_end=chosen.choice(["", "<|im_end|>", "<|end|>\n</s>"]),
        content_begin=chosen.choice(["", "", "<|text|>"]),
        messages={"harmony": "harmony", "muse": "recipients"}.get(name, ""),
    )
    text = _output(format, chosen)
    how: dict[str, Any] = {
        "begins_in": chosen.choice(["", "reasoning", "content"]),
        "reasoning_is_content": chosen.random() < 0.2,
        "fenced": chosen.random() < 0.1,
    }
    reason = chosen.choice(["stop", "length"])
    began = time.process_time()
    whole = _parsed(format, how, [text], reason)
    if time.process_time() - began > _SECONDS:
        raise Finding(f"{name}: {len(text)} characters take more than {_SECONDS} s")
    size = chosen.randint(1, 9)
    pieces = _parsed(format, how, [text[at : at + size] for at in range(0, len(text), size)], reason)
    if _shown(whole) != _shown(pieces):
        raise Finding(f"{name} in pieces of {size}: {text!r}: {_shown(whole)} and {_shown(pieces)}")
    if [call.index for call in whole.calls] != list(range(len(whole.calls))):
        raise Finding(f"{name}: {text!r}: {whole.calls}")
    for call in whole.calls:
        if call.name not in _TOOLS:
            raise Finding(f"{name}: {text!r} calls {call.name!r}")


def templates(seed: int) -> None:
    """Derives the format of a mutated template."""
    chosen = random.Random(seed)
    template = _mutated(chosen.choice(list(SAMPLES.values())).template, chosen)
    render = renderer(template)
    format = template_format(render, template)
    trial(format, render)


def _output(format: ChatFormat, chosen: random.Random) -> str:
    """Returns parts of a format's markers and of noise."""
    calls = format.calls
    assert calls is not None
    marks = [calls.section_begin, calls.begin, calls.name_end, calls.end, calls.separator, calls.section_end]
    if calls.argument is not None:
        marks += [calls.argument.key_begin, calls.argument.key_end, calls.argument.value_end]
    marks += [
        "<|channel|>analysis",
        "<|message|>",
        " to=functions.f",
        " to=self",
        "<|end|>",
        "<|start|>assistant",
    ]
    call = [*marks[:2], "f", marks[2], '{"a": "x"}', *marks[3:6]]
    parts = [part for _ in range(chosen.randint(1, 4)) for part in (call if chosen.random() < 0.6 else [])]
    for _ in range(chosen.randint(0, 8)):
        parts.insert(chosen.randint(0, len(parts)), chosen.choice([*marks, *_NOISE]))
    return _mutated("".join(parts), chosen)


def _mutated(text: str, chosen: random.Random) -> str:
    for _ in range(chosen.choice([0, 0, 1, 3])):
        at = chosen.randint(0, len(text))
        text = text[:at] + chosen.choice([*_NOISE, ""]) + text[at + chosen.randint(0, 4) :]
    return text


def _parsed(format: ChatFormat, how: dict[str, Any], pieces: list[str], reason: str) -> OutputDelta:
    parser = make_parser(format, _TOOLS, **how)
    whole = OutputDelta()
    for piece in pieces:
        whole = whole.joined(parser.feed(piece))
    return whole.joined(parser.finish(reason))


def _shown(delta: OutputDelta) -> tuple[Any, ...]:
    return delta.content, delta.reasoning, [(call.name, call.arguments) for call in delta.calls]
