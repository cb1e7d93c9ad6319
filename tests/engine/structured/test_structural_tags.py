"""Formats of structural tags, in the shape of xgrammar's: which texts each of them allows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.engine.structured.test_matcher import accepts, finish, follows, logits, sampler, sequence
from torch_armllm.engine.sampling_params import FreeReasoning, SamplingParams, StructuredOutputsParams

pytest.importorskip("llguidance", reason="llguidance is not installed: pip install torch_armllm[structured]")

ANY = {"type": "any_text"}
ONE = {"type": "json_schema", "json_schema": {"const": 1}}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def several(kind: str, *elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": kind, "elements": list(elements)}


def tag(begin: Any, content: dict[str, Any], end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def structure(form: Any) -> dict[str, Any]:
    return {"structural_tag": {"type": "structural_tag", "format": form}}


TAGS = {"tags": [tag("<a>", ONE, "</a>"), tag("<b>", ANY, "</b>")]}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<"], **TAGS}
SEPARATED = {"type": "tags_with_separator", "separator": ",", **TAGS}
DISPATCH = {"type": "dispatch", "rules": [["<f>", ONE], ["<g>", const("g")]]}

CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "const_string": (const("ab"), ["ab"], ["", "a", "abc"]),
    "empty const_string": (const(""), [""], ["a"]),
    "json_schema": (ONE, ["1"], ["2", "1 2"]),
    "json_schema true": ({"type": "json_schema", "json_schema": True}, ["1", '{"a": []}'], ["a"]),
    "white space": (
        {"type": "json_schema", "json_schema": {"type": "array"}, "max_whitespace_cnt": 1},
        ["[]", "[ ]"],
        ["[  ]"],
    ),
    "any_text": (ANY, ["", "any\ntext"], []),
    "excludes": ({**ANY, "excludes": ["xy", "é"]}, ["", "x", "yx"], ["xy", "axyb", "é"]),
    "max_chars": ({**ANY, "max_chars": 2}, ["", "é日"], ["abc"]),
    "regex": ({"type": "regex", "pattern": "a+/?"}, ["a", "aa/"], ["", "/"]),
    "grammar": (
        {"type": "grammar", "grammar": 'root ::= "(" root ")" | "x"'},
        ["x", "((x))"],
        ["(x", "()"],
    ),
    "lark": ({"type": "grammar", "grammar": 'start: "(" start ")" | "x"'}, ["x", "((x))"], ["(x"]),
    "sequence": (
        several("sequence", const("a"), ONE, const(""), ANY),
        ["a1", "a1 b"],
        ["", "a", "a2", "1"],
    ),
    "text before text": (several("sequence", ANY, const("x"), const("y")), ["xy", "axxyxy"], ["x", "xya"]),
    "text before a tag": (
        several("sequence", ANY, tag("<a>", ONE, "</a>")),
        ["<a>1</a>", "a<a>1</a>"],
        ["a", "a<a>2</a>", "<a>1</a>b"],
    ),
    "tags before text": (
        several("sequence", TRIGGERED, const("."), ONE),
        [".1", "a<a>1</a>b.1"],
        ["a", "a.2", "<.1"],
    ),
    "pattern before text": (
        several("sequence", {"type": "regex", "pattern": "a+"}, const("ab")),
        ["aab", "aaab"],
        ["ab", "b"],
    ),
    "or": (several("or", ONE, const("x"), tag("(", ANY, ")")), ["1", "x", "(y)"], ["", "2", "(", "xx"]),
    "optional": ({"type": "optional", "content": ONE}, ["", "1"], ["11"]),
    "optional text": (
        several("sequence", {"type": "optional", "content": ANY}, const(".")),
        [".", "a."],
        ["a"],
    ),
    "plus": ({"type": "plus", "content": tag("(", ONE, ")")}, ["(1)", "(1)(1)"], ["", "(1"]),
    "star": ({"type": "star", "content": tag("(", ONE, ")")}, ["", "(1)(1)"], ["(1"]),
    "repeat": (
        {"type": "repeat", "min": 1, "max": 2, "content": tag("(", ONE, ")")},
        ["(1)", "(1)(1)"],
        ["", "(1)(1)(1)"],
    ),
    "repeat without a limit": (
        {"type": "repeat", "min": 2, "max": -1, "content": const("x")},
        ["xx", "xxx"],
        ["x"],
    ),
    "repeat never": (
        several("sequence", {"type": "repeat", "min": 0, "max": 0, "content": ONE}, const("x")),
        ["x"],
        ["1x"],
    ),
    "tag": (tag("<t>", ANY, "</t>"), ["<t></t>", "<t>a</</t>"], ["<t>", "<t>a</t>b", "a<t></t>"]),
    "ends": (tag("(", ANY, [")", "]"]), ["()", "(a]"], ["(", "(a]b)", "(a}"]),
    "empty ends": (
        several("sequence", tag("(", const("a"), ""), tag("", ONE, "")),
        ["(a1"],
        ["(a", "a1"],
    ),
    "pattern in a tag": (tag("(", {"type": "regex", "pattern": ".*"}, ")"), ["()", "(ab)"], ["(", "(a)b"]),
    "triggered_tags": (
        TRIGGERED,
        ["", "x", "x<a>1</a>y<b>z</b>"],
        ["x<", "x<c", "<a>2</a>", "<b>"],
    ),
    "at_least_one": (
        {**TRIGGERED, "at_least_one": True},
        ["<a>1</a>", "<a>1</a>x<b></b>"],
        ["", "x<a>1</a>"],
    ),
    "stop_after_first": (
        {**TRIGGERED, "stop_after_first": True},
        ["", "x", "x<a>1</a>"],
        ["<a>1</a>x", "<a>1</a><a>1</a>"],
    ),
    "one": ({**TRIGGERED, "at_least_one": True, "stop_after_first": True}, ["<a>1</a>"], ["", "<a>1</a>x"]),
    "triggered excludes": ({**TRIGGERED, "excludes": ["!"]}, ["x<b>!</b>"], ["!", "x!<a>1</a>"]),
    "triggered in a tag": (
        tag("(", TRIGGERED, ")"),
        ["()", "(x<a>1</a>y)", "(<b>)</b>)"],
        ["(", "(x)y", "(<)"],
    ),
    "tags_with_separator": (
        SEPARATED,
        ["", "<a>1</a>", "<a>1</a>,<b>,</b>"],
        [",", "<a>1</a>,", "<a>1</a><a>1</a>", "x"],
    ),
    "separated at_least_one": ({**SEPARATED, "at_least_one": True}, ["<a>1</a>"], ["", ","]),
    "separated stop_after_first": (
        {**SEPARATED, "stop_after_first": True},
        ["", "<a>1</a>"],
        ["<a>1</a>,<a>1</a>"],
    ),
    "dispatch": (DISPATCH, ["", "x<f>1y<g>gz"], ["<f>2", "<g>"]),
    "dispatch once": ({**DISPATCH, "loop": False}, ["", "x", "x<f>1"], ["<f>1y"]),
}


@pytest.mark.parametrize("name", CASES)
def test_formats(name: str) -> None:
    form, texts, others = CASES[name]
    for text in [*texts, *others]:
        assert accepts(structure(form), text) == (text in texts), text
    assert accepts({"structural_tag": json.dumps(structure(form)["structural_tag"])}, texts[0])


def test_special_tokens_end_texts_and_begin_tags() -> None:
    """``<call>`` is a token of its own; the text of its characters is another one."""
    triggered = {"type": "triggered_tags", "triggers": ["<call>"], "tags": [tag("<call>(", ONE, ")<call>")]}
    for form in (triggered, tag({"type": "token", "token": "<call>"}, const("(1)"), "<call>")):
        assert follows(structure(form), "", "<call>")
        assert follows(structure(form), "<call>(1", ")")
        assert not follows(structure(form), "<call>", "<")
        assert follows(structure(form), "<call>(1)", "<call>")
        assert not follows(structure(form), "<call>(1)", "<")
    within = tag("a<call>", ANY, "b<call>c")
    for text, following, possible in [
        ("a", "<call>", True),
        ("a", "<", False),
        ("a<call>xb", "<call>", True),
        ("a<call>x", "<call>", False),
        ("a<call>b", "b", True),
        ("a<call>b<call>", "c", True),
        ("a<call>b<call>", "b", False),
        ("a<call>b<call>c", "", True),
    ]:
        assert follows(structure(within), text, following) == possible, (text, following)


def test_reasoning_precedes_a_format() -> None:
    form = several("sequence", {"type": "grammar", "grammar": 'root ::= "(" root ")" | "x"'}, TRIGGERED)
    given = {**structure(form), "reasoning": FreeReasoning("<think>", "</think>")}
    for text in ("x", "<think>a ( b</think>(x)y<a>1</a>", "<think></think>\nx"):
        assert accepts(given, text), text
    for text in ("y", "<think>a", "<think></think>(x<a>", "<think></think>x<a>2</a>"):
        assert not accepts(given, text), text


def test_generated_texts_match() -> None:
    choice = several("or", *(tag(f"<{name}>", ONE, f"</{name}>") for name in "ab"))
    written = finish(sequence(3, structure(several("sequence", const("{"), choice, const("}")))))
    assert written in ("{<a>1</a>}", "{<b>1</b>}")


def test_texts_that_follow_without_an_end_stop_nothing() -> None:
    """A part takes all that the next one needs, so that the output cannot end; nothing waits for its end."""
    rest = {"type": "grammar", "grammar": 'start: "b"'}
    made = sequence(0, structure(several("sequence", {"type": "regex", "pattern": "b+"}, rest)))
    for _ in range(4):
        made.token_ids.append(sampler()(logits(0), [made])[0].token_id)
    assert len(set(made.output_token_ids)) == 1


ENDLESS = (
    "free text of the structural tag does not tell where it ends: let a text or a tag with a beginning "
    "follow it, or the end of a tag, or nothing"
)


@pytest.mark.parametrize(
    ("form", "told"),
    [
        (3, 'format is 3; give {"type": …}'),
        ({}, None),
        ({"type": ["tag"]}, None),
        ({"type": "const_string"}, "format.value is nothing; give a text"),
        ({"type": "const_string", "value": 3}, "format.value is 3; give a text"),
        (
            {"type": "const_string", "value": "a", "style": "b"},
            "format has 'style', which is no field of const_string",
        ),
        (
            {"type": "json_schema", "json_schema": False},
            "format.json_schema is False; give a schema",
        ),
        (
            {**ONE, "style": "qwen_xml"},
            "format.style is 'qwen_xml', which is not supported; only json is",
        ),
        (
            {**ONE, "any_order": True},
            "format.any_order is True, which is not supported; the properties come in the schema's order",
        ),
        (
            {**ONE, "excludes": ["a"]},
            "format.excludes is ['a'], which is not supported; give the strings of the schema a pattern",
        ),
        ({**ONE, "max_whitespace_cnt": -1}, "format.max_whitespace_cnt is -1; give a number from 0 on"),
        ({**ANY, "max_tokens": 3}, "format.max_tokens is 3, which is not supported; give max_chars"),
        ({**ANY, "excludes": [""]}, "format.excludes is ['']; give a list of texts"),
        ({"type": "regex", "pattern": ""}, "format.pattern is ''; give a text"),
        ({"type": "sequence", "elements": []}, "format.elements is []; give a list of formats"),
        (
            several("or", ONE, {"type": "or", "elements": [ONE, {"type": "const_string"}]}),
            "format.elements[1].elements[1].value is nothing; give a text",
        ),
        (
            {"type": "repeat", "min": 3, "max": 2, "content": ONE},
            "a repeat has min 3 and max 2; give a max from min on, or -1 for no limit",
        ),
        (
            {"type": "repeat", "min": 3, "max": -2, "content": ONE},
            "format.max is -2; give a number from min on, or -1 for no limit",
        ),
        (tag(3, ONE, "b"), "format.begin is 3; give a text or a token"),
        (tag(["a", "b"], ONE, "b"), "a tag has several beginnings; give a tag for each"),
        (tag("a", ONE, ["b", 3]), 'format.end is 3; give {"type": …}'),
        (tag("a", ONE, ["b", ANY]), "format.end is {'type': 'any_text'}; give a text or a token"),
        (
            tag("a", ONE, ["", "b"]),
            "one end of a tag is empty, and others are not; give them, or the empty one alone",
        ),
        (
            {**TRIGGERED, "triggers": ["<a"]},
            "the structure '<b>' begins with no trigger; triggers: '<a'",
        ),
        ({**TRIGGERED, "triggers": [""]}, "the trigger '' is no text of a character or more"),
        ({**TRIGGERED, "tags": [ONE]}, "format.tags[0] is no tag"),
        ({**DISPATCH, "rules": [["a"]]}, "format.rules is [['a']]; give a list of [text, format]"),
        ({**DISPATCH, "loop": 1}, "format.loop is 1; give true or false"),
        (
            {"type": "qwen_xml_parameter", "json_schema": {}},
            "format.type is 'qwen_xml_parameter', which is not supported; arguments are JSON: give a "
            "json_schema",
        ),
        (
            {"type": "any_tokens"},
            "format.type is 'any_tokens', which is not supported; give any_text, which has no special token",
        ),
        (
            {"type": "exclude_token"},
            "format.type is 'exclude_token', which is not supported; give any_text with excludes",
        ),
        (
            {"type": "token_triggered_tags"},
            "format.type is 'token_triggered_tags', which is not supported; give triggered_tags, whose "
            "triggers may be special tokens",
        ),
        (
            {"type": "token_dispatch"},
            "format.type is 'token_dispatch', which is not supported; give dispatch, whose texts may be "
            "special tokens",
        ),
    ],
    ids=lambda value: None if isinstance(value, str) else "form",
)
def test_faults_of_formats(form: Any, told: str | None) -> None:
    if told is None:
        kind = form.get("type")
        told = (
            f"format.type is {str(kind)!r}, which is not supported; known types: const_string, json_schema, "
            "any_text, regex, grammar, token, sequence, or, optional, plus, star, repeat, tag, "
            "triggered_tags, tags_with_separator, dispatch"
        )
    with pytest.raises(ValueError) as refused:
        StructuredOutputsParams(**structure(form))
    assert str(refused.value) == f"structured outputs: {told}"


@pytest.mark.parametrize(
    ("form", "told"),
    [
        (several("sequence", ANY, ONE), ENDLESS),
        (tag("a", ANY, ""), None),
        ({**DISPATCH, "rules": [["a", ANY]]}, ENDLESS),
        ({**SEPARATED, "tags": [tag("a", ANY, "")]}, ENDLESS),
        (
            {"type": "star", "content": several("or", ANY, ONE)},
            "the structural tag repeats free text, which does not tell where it ends; give it once",
        ),
        (
            tag("(", TRIGGERED, "<x>"),
            "the end '<x>' of the structural tag holds the trigger '<', so that a tag would begin there",
        ),
        (
            {"type": "token", "token": "<no>"},
            "the structural tag's token '<no>' is no special token of the tokenizer",
        ),
        (
            tag({"type": "token", "token": 9}, ONE, "a"),
            "the structural tag's token 9 is no special token of the tokenizer",
        ),
        (
            {"type": "grammar", "grammar": "root ::= foo"},
            "the grammar is no EBNF: Rule 'foo' not found",
        ),
        (
            {"type": "json_schema", "json_schema": {"x-guidance": {"whitespace_pattern": "]+"}}},
            "whitespace_pattern ']+' matches text that is no white space, as [ \\t\\n\\r]* does not",
        ),
    ],
    ids=["sequence", "last", "dispatch", "separated", "star", "trigger", "token", "id", "ebnf", "space"],
)
def test_formats_that_no_grammar_can_tell_apart(form: Any, told: str | None) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**structure(form)))
    if told is None:
        sampler().check(params)
        return
    with pytest.raises(ValueError) as refused:
        sampler().check(params)
    assert str(refused.value) == f"structured outputs: {told}"


def test_two_shapes_at_once_are_refused() -> None:
    with pytest.raises(ValueError) as refused:
        StructuredOutputsParams(structural_tag={"format": ANY, "triggers": ["a"]})
    assert str(refused.value) == (
        "structured outputs: structural_tag has a format, and triggers or structures as well; give one shape"
    )
