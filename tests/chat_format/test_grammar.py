"""Forced calls: the grammar accepts what a template writes, and what it forces is parsed back."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from tests.chat_format.templates import SAMPLES
from torch_armllm.chat_format.aliases import TOOL_PARSERS
from torch_armllm.chat_format.format import ChatFormat
from torch_armllm.chat_format.grammar import forced_calls, triggered_calls
from torch_armllm.chat_format.known import CALLS
from torch_armllm.chat_format.rendering import make_parser, renderer, template_format
from torch_armllm.engine.structured.limits import check_size
from torch_armllm.engine.structured.structural_tag import read_structural_tag
from torch_armllm.engine.structured.tag_grammar import tag_grammar

llguidance = pytest.importorskip("llguidance", reason="forced calls need the extra structured")
TOOLS: dict[str, Any] = {
    "f": {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"]},
    "g": {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"type": "boolean"}},
        "required": ["n"],
    },
    "h": {
        "type": "object",
        "properties": {
            "t": {"type": "string", "maxLength": 4},
            "c": {"const": "a b"},
            "s": {"enum": ["1", "null", "<x"]},
        },
    },
}
for schema in TOOLS.values():
    schema["additionalProperties"] = False
FORMATS = {name: ChatFormat(calls=calls) for name, calls in TOOL_PARSERS.items() if calls is not None} | {
    "harmony": ChatFormat(calls=CALLS["harmony"], messages="harmony"),
    "muse": ChatFormat(calls=CALLS["muse"], messages="recipients"),
    "functionary_v3": ChatFormat(calls=CALLS["functionary_v3"], content_begin=">>>all\n", begun=">>>"),
}


def matcher(tag: dict[str, Any]) -> Any:
    """Returns a matcher of a structural tag, with a token for each byte."""
    made = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), tag_grammar(read_structural_tag(tag), {}))
    assert not made.is_error(), made.get_error()
    return made


def walk(tag: dict[str, Any], chosen: random.Random) -> str:
    """Returns a text that the grammar allows, byte by byte."""
    made, written = matcher(tag), bytearray()
    while not made.is_stopped() and len(written) < 2000:
        mask = made.compute_bitmask()
        allowed = [at for at in range(256) if mask[at // 8] >> (at % 8) & 1]
        if made.is_accepting() and (not allowed or chosen.random() < 0.5):
            return written.decode()
        printable = [at for at in allowed if at in b"\n\t" or 32 <= at < 127]
        byte = chosen.choice(printable or allowed)
        assert made.consume_token(byte)
        written.append(byte)
    return written.decode()


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_forced_is_parsed_back(name: str) -> None:
    format = FORMATS[name]
    for seed in range(4):
        text = walk(forced_calls(format, TOOLS, seed % 2 == 0), random.Random(seed))
        parser = make_parser(format, TOOLS)
        got = parser.feed(text).joined(parser.finish())
        assert got.content.strip() == "" and got.calls, text
        assert seed % 2 == 0 or len(got.calls) == 1
        for called, arguments in ((call.name or "", call.arguments) for call in got.calls):
            values = json.loads(arguments)
            jsonschema.validate(values, TOOLS[called])
            assert set(values) <= set(TOOLS[called]["properties"])


@pytest.mark.parametrize("name", SAMPLES)
def test_the_templates_own_calls_are_allowed(name: str) -> None:
    sample = SAMPLES[name]
    format = template_format(renderer(sample.template), sample.template)
    made = matcher(forced_calls(format, TOOLS, True))
    text = sample.output.partition("Hi")[2].strip()
    consumed = made.try_consume_tokens(list(text.encode()))
    assert text.encode()[consumed:] == b"" and made.is_accepting()


def test_a_strict_call_is_free_until_it_begins() -> None:
    made = matcher(triggered_calls(ChatFormat(calls=TOOL_PARSERS["qwen3_coder"]), TOOLS, True))
    free = list(b"a <tool, and 7\n")
    assert made.try_consume_tokens(free) == len(free) and made.is_accepting()
    begun = list(b"<tool_call>\n<function=f>\n<parameter=a>\n")
    assert made.try_consume_tokens(begun) == len(begun)
    assert made.try_consume_tokens(list(b"z")) == 0


def test_calls_without_markers_cannot_be_triggered() -> None:
    with pytest.raises(ValueError, match="no marker"):
        triggered_calls(ChatFormat(calls=TOOL_PARSERS["llama"]), TOOLS, True)
    with pytest.raises(ValueError, match="not known"):
        forced_calls(ChatFormat(), TOOLS, True)
    with pytest.raises(ValueError, match="content has markers"):
        triggered_calls(ChatFormat(calls=TOOL_PARSERS["hermes"], content_begin="<response>"), TOOLS, True)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "x"}}}, "pattern"),
        (
            {"properties": {"a": {"anyOf": [{"type": "string", "minLength": 1}, {"type": "null"}]}}},
            "minLength",
        ),
        ({"properties": {"a": {"type": ["string", "object"]}}}, "object or a list"),
        ({"properties": {"a": {"enum": ["", "b"]}}}, "empty"),
        ({"properties": {"a>": {"type": "string"}}}, "no place"),
        ({"properties": {}, "required": ["a"]}, "does not describe"),
        ({"anyOf": [{"required": ["a"]}], "properties": {"a": {}}}, "anyOf"),
        ({"$ref": "#/$defs/none"}, "not in it"),
    ],
)
def test_schemas_of_no_grammar(schema: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        forced_calls(ChatFormat(calls=TOOL_PARSERS["qwen3_coder"]), {"f": schema}, True)
    forced_calls(ChatFormat(calls=TOOL_PARSERS["hermes"]), {"f": schema}, True)  # in JSON


@pytest.mark.parametrize("kind", ["string", "integer"])
@pytest.mark.parametrize("required", [[], ["a300"]])
def test_hundreds_of_arguments(kind: str, required: list[str]) -> None:
    tool = {"properties": {f"a{at}": {"type": kind} for at in range(500)}, "required": required}
    tag = forced_calls(ChatFormat(calls=TOOL_PARSERS["qwen3_coder"]), {"f": tool}, True)
    check_size("structural_tag", tag)
    given = "\n".join(f"<parameter=a{at}>\n7\n</parameter>" for at in (2, 300, 499))
    text = f"<tool_call>\n<function=f>\n{given}\n</function>\n</tool_call>".encode()
    assert matcher(tag).try_consume_tokens(list(text)) == len(text)


def test_a_text_ends_at_the_first_end() -> None:
    tools = {"f": {"properties": {"a": {"type": "string"}, "b": {}}}}
    made = matcher(forced_calls(ChatFormat(calls=TOOL_PARSERS["qwen3_coder"]), tools, False))
    begun = b"<tool_call>\n<function=f>\n<parameter=a>\n</b> x\n"
    following = b"</parameter>\n<parameter=b>\n"
    assert made.try_consume_tokens(list(begun + following)) == len(begun + following)
    made = matcher(forced_calls(ChatFormat(calls=TOOL_PARSERS["qwen3_coder"]), tools, False))
    assert made.try_consume_tokens(list(begun[:-1] + b"</parameter>")) == len(begun) + 10
