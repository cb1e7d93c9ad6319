"""The end of an output behind its first call, in pieces of any size."""

from __future__ import annotations

import pickle

import pytest

from torch_armllm.chat_format.aliases import TOOL_PARSERS
from torch_armllm.chat_format.deltas import OutputDelta
from torch_armllm.chat_format.first_call import FirstCall
from torch_armllm.chat_format.format import ChatFormat, ReasoningFormat
from torch_armllm.chat_format.known import CALLS
from torch_armllm.chat_format.rendering import make_parser

TOOLS = {name: {"properties": {"a": {"type": "integer"}}} for name in "fg"}
HARMONY = ChatFormat(
    reasoning=ReasoningFormat("<|channel|>analysis<|message|>", "<|end|>"),
    calls=CALLS["harmony"],
    messages="harmony",
)
THINKS = ReasoningFormat("<think>", "</think>")
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
OTHER = '<tool_call>{"name": "g", "arguments": {"a": 1}}</tool_call>'
ARGUMENT = "<parameter=a>\n1\n</parameter>\n</function>"
CASES = [
    ("hermes", f"I look.{CALL}", f"\n{OTHER}"),
    ("hermes", CALL, "Then I say"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}', f"\n{OTHER}"),  # no end marker
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}', '[TOOL_CALLS]g[ARGS]{"a": 1}'),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}', ', {"name": "g", "arguments": {}}]'),
    ("llama", '{"name": "f", "parameters": {"a": 1}}', '; {"name": "g", "parameters": {}}'),
    ("pythonic", "[f(a=1)", ", g(a=2)]"),
    ("qwen3_coder", f"<tool_call>\n<function=f>\n{ARGUMENT}", f"\n<tool_call>\n<function=g>\n{ARGUMENT}"),
    (
        "deepseek_v31",
        '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>',
        "<｜tool▁call▁begin｜>g",
    ),
    ("gemma4", "<|tool_call>call:f{a:1}<tool_call|>", "<|tool_call>call:g{a:1}<tool_call|>"),
]
"""Format, an output up to the end of its first call, and what follows."""


def check(format: ChatFormat, text: str, rest: str, size: int) -> None:
    whole, end = text + rest, pickle.loads(pickle.dumps(FirstCall(format, TOOLS))).begin()
    found = [end(whole[at : at + size]) for at in range(0, len(whole), size)]
    kept = next(each for each in found if each is not None)
    assert kept == len(text)
    told = len(text) + 20  # it is found soon
    assert found[min(told // size, len(found) - 1)] == kept
    parser = make_parser(format, TOOLS)
    got = OutputDelta().joined(parser.feed(whole[:kept])).joined(parser.finish())
    assert [call.name for call in got.calls] == ["f"]
    assert got.calls[0].arguments.replace(" ", "") == '{"a":1}'
    assert got.content == text.partition("<tool_call>")[0] * text.startswith("I look")


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("name", "text", "rest"), CASES)
def test_an_output_ends_behind_its_first_call(name: str, text: str, rest: str, size: int) -> None:
    check(ChatFormat(calls=TOOL_PARSERS[name]), text, rest, size)


@pytest.mark.parametrize("size", [1, 1000])
def test_messages_with_headers(size: int) -> None:
    begun = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.{}<|message|>{{"a": 1}}'
    rest = "<|call|><|start|>assistant" + call.format("g")
    check(HARMONY, begun + call.format("f"), rest, size)


def test_no_end_without_a_call() -> None:
    format = ChatFormat(calls=TOOL_PARSERS["hermes"], reasoning=THINKS)
    thought = f"<think>{CALL} is how</think>yes"
    for text in ("only text", "<tool_call>nonsense</tool_call>", CALL[:-20], thought):
        end = FirstCall(format, TOOLS).begin()
        assert {end(character) for character in text} == {None}
    end = FirstCall(format, TOOLS, "reasoning").begin()
    assert end(f"I could {CALL}") is None  # the reasoning may go on
    assert end(f"</think>{CALL}") == len(f"I could {CALL}</think>{CALL}")
