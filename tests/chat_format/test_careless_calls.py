"""Calls as models write them who do not keep to their format: what they mean, in valid JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from torch_armllm.chat_format.aliases import TOOL_PARSERS
from torch_armllm.chat_format.deltas import OutputDelta
from torch_armllm.chat_format.format import ChatFormat
from torch_armllm.chat_format.parser import FormatParser

SIZES = pytest.mark.parametrize("size", [1, 4, 1000])
TOOLS: dict[str, Any] = {
    "f": {
        "type": "object",
        "properties": {"a": {"type": "string"}, "n": {"type": "integer"}, "b": {"type": "boolean"}},
    },
    "python": {"type": "object", "properties": {"code": {"type": "string"}}},
}


def parse(name: str, text: str, size: int, reason: str = "stop", tools: Any = TOOLS) -> OutputDelta:
    parser = FormatParser(ChatFormat(calls=TOOL_PARSERS[name]), tools)
    whole = OutputDelta()
    for at in range(0, len(text), size):
        whole = whole.joined(parser.feed(text[at : at + size]))
    return whole.joined(parser.finish(reason))


def calls(delta: OutputDelta) -> list[tuple[str | None, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in delta.calls]


@SIZES
@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ('{"a": "x\ny\tz"}', {"a": "x\ny\tz"}),
        (r'{"a": "C:\dir \'q\' \"r\" \u00e9"}', {"a": "C:\\dir 'q' \"r\" é"}),
        ('{"a": "x", "n": 1,}', {"a": "x", "n": 1}),
        ('{"a": "x" , }', {"a": "x"}),
        ('{"a": ["x", ["y",],],}', {"a": ["x", ["y"]]}),
        ('{"a": None, "b": True, "n": -1.5e3}', {"a": None, "b": True, "n": -1500}),
        ("{'a': 'it\\'s \"x\"', 'n': 2}", {"a": 'it\'s "x"', "n": 2}),
        ('{a: New York, "n": 2}', {"a": "New York", "n": 2}),
        ('{"a": "// x", // a note, with a comma\n "n": 2, // more\n}', {"a": "// x", "n": 2}),
        ('{"a": "x"}}', {"a": "x"}),
        ('"{\\"a\\": \\"x\\"}"', {"a": "x"}),
        ('{"a": NaN}', {"a": "NaN"}),
    ],
)
def test_what_is_no_json_becomes_json(arguments: str, meant: Any, size: int) -> None:
    text = f'Hm <tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    got = parse("hermes", text, size)
    assert (got.content, calls(got)) == ("Hm", [("f", meant)])


@SIZES
@pytest.mark.parametrize(
    "value", ['{"a": "x\\ny", "n": 12, "b": [true, null, {"c": -0.5e-3}]}', "{ }", '{"a":"é\\u00e9\\\\"}']
)
def test_json_stays_as_it_is(value: str, size: int) -> None:
    (call,) = parse("hermes", f'<tool_call>{{"name": "f", "arguments": {value}}}</tool_call>', size).calls
    assert call.arguments == value


@SIZES
@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ("'one\ntwo'", "one\ntwo"),
        ("'it's so'", "it's so"),
        ("'say \"hi\", please'", 'say "hi", please'),
        ("'O'Brien \"quoted\"'", 'O\'Brien "quoted"'),
        ("'d = {'k': 1}'", "d = {'k': 1}"),
        ("'one' 'two'", "onetwo"),
        ("'''it's\ntwo'''", "it's\ntwo"),
        (r"'it\'s'", "it's"),
    ],
)
def test_strings_of_python_with_line_ends_and_quotes(value: str, meant: str, size: int) -> None:
    got = parse("lfm2", f"<|tool_call_start|>[f(n=1, a={value}), f(a='b')]<|tool_call_end|>", size)
    assert (got.content, calls(got)) == ("", [("f", {"n": 1, "a": meant}), ("f", {"a": "b"})])


KIMI = '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": "x"}<|tool_call_end|>'
STEP3 = (
    "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
    '<steptml:invoke name="f"><steptml:parameter name="a">x</steptml:parameter></steptml:invoke>'
    "<｜tool_call_end｜><｜tool_calls_end｜>"
)
CALL = '{"name": "f", "arguments": {"a": "x"}}'
QWEN = "<function=f>\n<parameter=a>\nx"
MINIMAX = '<minimax:tool_call><invoke name="f"><parameter name="a">x</parameter></invoke></minimax:tool_call>'
DSML = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">x'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>"
)


@SIZES
@pytest.mark.parametrize(
    "text", [CALL, f" \n{CALL}\n", f"```json\n{CALL}\n```", f"```\n{CALL}\n{CALL}\n```", f"{CALL}\n{CALL}"]
)
def test_a_call_that_begins_the_content_needs_no_markers(text: str, size: int) -> None:
    got = parse("hermes", text, size)
    assert (got.content.strip(), calls(got)) == ("", [("f", {"a": "x"})] * text.count(CALL))


@SIZES
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", f"<tool_call>\n{CALL}\n</tool_call>"),
        ("qwen3_coder", f"```json\n{CALL}\n```"),
        ("lfm2", f"<|tool_call_start|>[{CALL}]<|tool_call_end|>"),
        ("minimax_m2", f"<minimax:tool_call>\n{CALL}\n</minimax:tool_call>"),
        ("hermes", f"[{CALL}]"),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "x"}'),
        ("mistral", '[TOOL_CALLS]f{"a": "x"}'),
        ("mistral", f"[TOOL_CALLS][{CALL}]"),
        ("deepseek_v31", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f{"a": "x"}<｜tool▁call▁end｜>'),
        ("longcat", f"<longcat_tool_call>{CALL}</longcat_tool_call>"),
        ("granite-20b-fc", f"<function_call> {CALL}"),
        ("minimax", f"<tool_calls>\n{CALL}\n</tool_calls>"),
        ("gigachat3", f"function call<|role_sep|>\n{CALL}<|message_sep|>\n\n"),
        ("xlam", f"[{CALL}]"),
        ("xlam", f"```json\n[{CALL}]\n```"),
        ("xlam", f"[TOOL_CALLS][{CALL}]"),
        ("step3", STEP3),
        ("cohere_command3", '<|START_ACTION|>[{"tool_name": "f", "parameters": {"a": "x"}}]<|END_ACTION|>'),
        ("functiongemma", "<start_function_call>call:f{a:<escape>x<escape>}<end_function_call>"),
        ("kimi_k2", f"<|tool_calls_section_begin|>{KIMI}<|tool_calls_section_end|>"),
        ("kimi_k2", f"<|tool_call_section_begin|>{KIMI}<|tool_call_section_end|>"),
        ("kimi_k2", KIMI.replace("functions.f:0", "f")),
        ("hermes", "<tool_call>{'name': 'f', 'arguments': {'a': 'x'}}</tool_call>"),
        ("mistral", f"[{CALL}]"),
        ("xlam", f"<tool_call>[{CALL}]</tool_call>"),
        ("llama3_json", '<function=f>{"a": "x"}</function>'),
        ("llama4_pythonic", '<|python_start|>[f(a="x")]<|python_end|>'),
        ("phi4_mini_json", f"functools [{CALL}]"),
        ("gigachat3", f"<|message_sep|>\n\nfunction call<|role_sep|>\n{CALL}"),
        ("gigachat3", f"function call{CALL}"),
        (
            "qwen3_coder",
            f"<tool_call>\n{QWEN}\n</parameter>\n</function>\n</tool_call>".replace("=f", '="f"'),
        ),
        (
            "qwen3_coder",
            f"<tool_call>\n{QWEN}\n</parameter>\n</function>\n</tool_call>".replace("=a", "='a'"),
        ),
        ("qwen3_coder", f"<tool_call>\n{QWEN}\n</function>\n</tool_call>\n"),
        ("qwen3_coder", '<tool_call><function=f>{"a": "x"}</function></tool_call>'),
        ("minimax_m2", MINIMAX.replace('"', "'")),
        ("minimax_m2", MINIMAX.replace('"', "")),
        ("deepseek_v32", DSML),
        ("deepseek_v32", DSML.replace(' string="true"', "")),
    ],
)
def test_models_mix_up_markers(name: str, text: str, size: int) -> None:
    got = parse(name, text, size)
    assert (got.content.strip(), calls(got)) == ("", [("f", {"a": "x"})])


@SIZES
@pytest.mark.parametrize(
    "text",
    [
        f"As {CALL}",
        f"As\n{CALL}",
        '{"name": "g", "arguments": {}}',
        '{"arguments": {"a": "x"}, "name": "f"}',
        '{"a": "x"}',
        "```python\nf()\n```",
        '```json\n{"a": [1, 2]}\n```',
    ],
)
def test_other_json_without_markers_is_content(text: str, size: int) -> None:
    got = parse("hermes", text, size)
    assert (got.content, got.calls) == (text, [])


@SIZES
@pytest.mark.parametrize("end", ["", "<|eom_id|>"])
@pytest.mark.parametrize(
    ("text", "tool", "arguments"),
    [
        ('print("hi")\nx = 1', "python", {"code": 'print("hi")\nx = 1'}),
        ('{"code": "x"}', "python", {"code": "x"}),
        ("{1: 2}", "python", {"code": "{1: 2}"}),
        ('f.call(a="x", n=2)', "f", {"a": "x", "n": 2}),
        ('{"name": "f", "parameters": {"a": "x"}}', "f", {"a": "x"}),
    ],
)
def test_code_behind_its_tag(text: str, tool: str, arguments: Any, end: str, size: int) -> None:
    got = parse("llama3_json", f"Hm <|python_tag|>{text}{end}", size)
    assert (got.content, calls(got)) == ("Hm", [(tool, arguments)])


def test_code_streams_and_needs_a_tool_that_runs_it() -> None:
    (call,) = parse("llama3_json", '<|python_tag|>print("a', 1, "length").calls
    assert (call.name, call.arguments) == ("python", '{"code": "print(\\"a')
    got = parse("llama3_json", "<|python_tag|>print(1)", 1, tools={"f": TOOLS["f"]})
    assert (got.content, got.calls) == ("<|python_tag|>print(1)", [])


@SIZES
def test_a_turn_may_end_with_the_beginning_of_a_call(size: int) -> None:
    """MiniMax M2 ends its turns so; a list in JSON begins with a bracket, too."""
    parser = FormatParser(ChatFormat(calls=TOOL_PARSERS["hermes"], turn_end="[e~["), TOOLS)
    text = f"<tool_call>{CALL}</tool_call>[e~["
    deltas = [parser.feed(text[at : at + size]) for at in range(0, len(text), size)]
    assert "".join(delta.content for delta in [*deltas, parser.finish()]) == ""


ONE, TWO = ('{"name": "f", "arguments": {"a": "x"}}', '{"name": "f", "arguments": {"a": "y"}}')


@SIZES
@pytest.mark.parametrize(
    ("text", "content", "meant"),
    [
        (f"<tools>\n{ONE}\n{TWO}\n</tools>", "", "xy"),
        (f"<tools>\n{ONE}\n</tools>\n<tools>\n{TWO}\n</tools>", "", "xy"),
        (f"I look.\n<function_call>{ONE}</function_call>", "I look.", "x"),
        (f"I look.\n<response>[{ONE}, {TWO}]</response> Wait.", "I look. Wait.", "xy"),
        (f"```xml\n<tool_call>\n{ONE}\n</tool_call>\n```", "", "x"),
        (f"```json\n<tool>{ONE}</tool>\n```", "", "x"),
        (f"```json\n{ONE}\n```\n\n```json\n{TWO}\n```", "", "xy"),
        (f"<tools>{ONE}", "", "x"),
        ('<tools>{"name": "g"}</tools>', '<tools>{"name": "g"}</tools>', ""),
        ("<response>Hm.</response>", "<response>Hm.</response>", ""),
        ('```json\n{"a": 1}\n```', '```json\n{"a": 1}\n```', ""),
        (f"So:\n```json\n{ONE}\n```", f"So:\n```json\n{ONE}\n```", ""),
    ],
)
def test_other_tags_are_those_of_calls(text: str, content: str, meant: str, size: int) -> None:
    got = parse("hermes", text, size)
    assert [call["a"] for _, call in calls(got)] == list(meant)
    assert " ".join(got.content.split()) == " ".join(content.split())


@SIZES
@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ("x\n<parameter=n>\n2", {"a": "x", "n": 2}),
        ("x\n<parameter=c>\n2", {"a": "x\n<parameter=c>\n2"}),
        ("x\n<parameter=a>\n2", {"a": "x\n<parameter=a>\n2"}),
        ("</function>\n</tool_call>\ny", {"a": "</function>\n</tool_call>\ny"}),
    ],
)
def test_the_next_argument_of_the_tool_ends_a_value(value: str, meant: Any, size: int) -> None:
    text = f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"
    got = parse("qwen3_coder", text, size)
    assert (got.content, calls(got)) == ("", [("f", meant)])
