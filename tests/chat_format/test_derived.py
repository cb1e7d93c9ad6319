"""Formats that are derived from templates of all kinds of syntax, and templates that show none."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from tests.chat_format.templates import LOOSE, SAMPLES, calls, chat
from torch_armllm.chat_format.aliases import TOOL_PARSERS
from torch_armllm.chat_format.deltas import OutputDelta
from torch_armllm.chat_format.format import ChatFormat
from torch_armllm.chat_format.parser import FormatParser
from torch_armllm.chat_format.prompt_part import begins_in
from torch_armllm.chat_format.rendering import renderer, template_format
from torch_armllm.chat_format.trial import trial

BOTH = SAMPLES | LOOSE
TOOLS: dict[str, Any] = {
    "f": {"type": "object", "properties": {"a": {"type": "string"}}},
    "g": {"type": "object", "properties": {"n": {"type": "integer"}}},
}


def derived(template: str) -> ChatFormat:
    return template_format(renderer(template), template)


def parse(format: ChatFormat, text: str, size: int, part: str = "", reason: str = "stop") -> OutputDelta:
    parser = FormatParser(format, TOOLS, begins_in=part)
    whole = OutputDelta()
    for at in range(0, len(text), size):
        whole = whole.joined(parser.feed(text[at : at + size]))
    return whole.joined(parser.finish(reason))


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("name", BOTH)
def test_reasoning_content_and_two_calls(name: str, size: int) -> None:
    sample = BOTH[name]
    format, render = derived(sample.template), renderer(sample.template)
    assert trial(format, render) is None
    part = begins_in(format, render([{"role": "user", "content": "a"}], add_generation_prompt=True))
    got = parse(format, sample.output, size, part)
    assert (got.reasoning, got.content.strip()) == ("hm", "Hi")
    calls = [(call.index, call.name, json.loads(call.arguments)) for call in got.calls]
    assert calls == [(0, "f", {"a": "x"}), (1, "g", {"n": 7})]


@pytest.mark.parametrize("name", BOTH)
def test_any_cut_is_a_beginning(name: str) -> None:
    """A text that is cut off has the beginning of the whole; nothing is shown that has to be taken back."""
    sample = BOTH[name]
    format = derived(sample.template)
    part = "reasoning" if name == "attributes" else ""
    whole = parse(format, sample.output, 1000, part)
    for cut in range(len(sample.output)):
        got = parse(format, sample.output[:cut], 1000, part, "length")
        for call, full in zip(got.calls, whole.calls, strict=False):
            assert full.arguments.startswith(call.arguments), (cut, call)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[-1].content }}",
        "",
        "{{ raise_exception('no') }}",
        "{% for m in messages %}{{ m.nothing.at.all }}{% endfor %}",
        chat("{{ m.content }}"),
        chat("{{ m.content }}{{ m.tool_calls }}"),
        chat(calls("<{{ f.name }}>{{ f.arguments | tojson }}</{{ f.name }}>")),
        chat("{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"),
        "{% for m in messages %}{{ m.content }}{{ range(9) | random }}{% endfor %}",
    ],
)
def test_templates_without_a_format_say_so(template: str) -> None:
    format = derived(template)
    assert trial(format, renderer(template)) is not None
    assert parse(ChatFormat(calls=None), "a <b", 1).content == "a <b"


def test_a_template_that_loops_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def loops(messages: list[dict[str, Any]], **options: Any) -> str:
        tried.append(messages)
        raise ValueError("the chat template did not render within 5 s")

    clock = SimpleNamespace(monotonic=lambda: 10.0 * len(tried))
    monkeypatch.setattr("torch_armllm.chat_format.probe.time", clock)
    assert template_format(loops, "").calls is None
    assert len(tried) == 1


def test_names_and_halves() -> None:
    format = derived(SAMPLES["xml"].template)
    for text in (
        "<seed:tool_call>",
        "<seed:tool_call>\n<function=h>\n</function>\n</seed:tool_call>",
        "<seed:tool_call>\n<function=ff>\n</function>",
        "a <seed:tool_c",
        "<function=",
    ):
        got = parse(format, text, 1)
        assert (got.content, got.calls) == (text, [])
    for text in (
        "<function=f>\n<parameter=a>x</parameter>\n</function>",
        "<seed:tool_call><function=f><parameter=a>x",
    ):
        (call,) = parse(format, text, 2).calls
        assert call.name == "f" and call.arguments.startswith('{"a": "x')
    nested = "<seed:tool_call>\n<function=f>\n<parameter=a><function=g></parameter>\n</function>"
    (call,) = parse(format, nested, 1).calls
    assert json.loads(call.arguments) == {"a": "<function=g>"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("attributes", 'hm</think><calls><call tool="f"></call></calls>'),
        ("a name on a line", "<think>hm</think>f\n{}"),
    ],
)
def test_calls_without_arguments(name: str, text: str) -> None:
    part = "reasoning" if name == "attributes" else ""
    got = parse(derived(SAMPLES[name].template), text, 1, part)
    assert (got.reasoning, got.content) == ("hm", "")
    assert [(call.name, call.arguments) for call in got.calls] == [("f", "{}")]


@pytest.mark.parametrize("text", ["if f\nis a word, {}", 'I call f {"a": 1}', "g\nf"])
def test_a_name_within_a_line_is_a_word(text: str) -> None:
    got = parse(derived(SAMPLES["a name on a line"].template), text, 2)
    assert (got.content, got.calls) == (text, [])


@pytest.mark.parametrize("size", [1, 2, 1000])
def test_a_marker_may_hold_a_shorter_one(size: int) -> None:
    text = '<tool_call>7<]minimax[>[<invoke name="f">]<]minimax[>[</invoke>'
    got = parse(ChatFormat(calls=TOOL_PARSERS["minimax_m3"]), text, size)
    assert (got.content, [call.name for call in got.calls]) == ("<tool_call>7", ["f"])


@pytest.mark.parametrize("bracket", ["}", "]", "x}", "a=}"])
def test_a_bracket_in_the_place_of_a_value_ends_the_call(bracket: str) -> None:
    got = parse(ChatFormat(calls=TOOL_PARSERS["pythonic"]), f"[f({bracket} more", 1)
    assert [call.name for call in got.calls] == ["f"] and got.content.endswith("more")


def test_a_call_within_reasoning_that_goes_on_is_reasoning() -> None:
    format = derived(SAMPLES["wrapped"].template)
    call = '<tool>{"name": "f", "arguments": {"a": "x"}}</tool>'
    got = parse(format, f"<think>or {call} so</think>Hi", 1)
    assert (got.reasoning, got.content, got.calls) == (f"or {call} so", "Hi", [])
    got = parse(format, f"<think>so {call}", 1)
    assert (got.reasoning, got.content, len(got.calls)) == ("so", "", 1)


@pytest.mark.parametrize(
    ("begin", "end"),
    [("<scratchpad>", "</scratchpad>"), ("<|begin_of_thought|>", "<|end_of_thought|>")],
)
def test_what_a_template_cuts_off_is_reasoning(begin: str, end: str) -> None:
    turn = f"{{%- set said = m.content.split('{end}')[-1] %}}{{{{ said.split('</answer>')[0] }}}}"
    format = derived(chat(turn))
    assert format.reasoning is not None and format.reasoning.begin == begin
    got = parse(format, f"{begin}hm{end}Hi", 1)
    assert (got.reasoning, got.content) == ("hm", "Hi")
    assert derived(chat("{{ m.content.split('</answer>')[0] }}")).reasoning is None


def test_a_name_comes_at_once_and_arguments_as_they_are_written() -> None:
    parser = FormatParser(derived(SAMPLES["xml"].template), TOOLS)
    seen = [
        parser.feed(piece)
        for piece in ("Hi <seed:tool_call><function=f>", "<parameter=a>", "one ", "two</par")
    ]
    assert [[(call.name, call.arguments) for call in delta.calls] for delta in seen] == [
        [("f", "")],
        [(None, '{"a": "')],
        [(None, "one ")],
        [(None, "two")],
    ]
