"""Outputs of models with published templates mean what their authors' tests say, whole and cut anywhere."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from torch_armllm.chat_format.format import ChatFormat
from torch_armllm.chat_format.prompt_part import begins_in
from torch_armllm.chat_format.rendering import make_parser, renderer, template_format
from torch_armllm.engine.text.template_process import TemplateError

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "chat"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"{FOLDER} is missing: it holds the templates")
CASES = (
    [json.loads(line) for line in (FOLDER / "cases.jsonl").read_text(encoding="utf-8").splitlines()]
    if FOLDER.is_dir()
    else []
)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@cache
def source(template: str) -> str:
    return (FOLDER / "templates" / template).read_text(encoding="utf-8")


@cache
def format_of(template: str) -> ChatFormat:
    return template_format(renderer(source(template), SPECIAL), source(template))


@cache
def prompt_of(template: str, thinks: bool) -> str:
    render = renderer(source(template), SPECIAL)
    messages = [{"role": "user", "content": "Hey there!"}]
    try:
        return render(messages, add_generation_prompt=True, enable_thinking=thinks, thinking=thinks)
    except (ValueError, TemplateError):
        return ""


def parsed(case: dict[str, Any], pieces: list[str]) -> tuple[str, str, list[tuple[str, Any]]]:
    format = format_of(case["template"])
    part = case["continue"] or begins_in(format, prompt_of(case["template"], case["enable_thinking"]))
    parser = make_parser(
        format,
        {tool["name"]: tool["parameters"] for tool in case["tools"]},
        begins_in=part,
        continued=bool(case["continue"]),
        reasoning_is_content=case["reasoning_format"] == "none",
        fenced=bool(case["json_schema"]),
    )
    content = reasoning = ""
    calls: dict[int, list[str]] = {}
    if case["continue"]:
        begun = case["messages"][-1]
        content = begun["content"]
        reasoning = begun["reasoning_content"] if case["reasoning_format"] != "none" else ""
    for delta in [*map(parser.feed, pieces), parser.finish("length" if case["partial"] else "stop")]:
        content += delta.content
        reasoning += delta.reasoning
        for call in delta.calls:
            assert (call.name is None) == (call.index in calls)
            calls.setdefault(call.index, [call.name or "", ""])[1] += call.arguments
    return content.strip(), reasoning.strip(), [(name, value(text)) for name, text in calls.values()]


def value(text: str) -> Any:
    """Arguments as a JSON value; those that were cut off as they are."""
    try:
        return json.loads(text)
    except ValueError:
        return text.strip()


def names() -> list[str]:
    return [f"{number}-{case['template']}" for number, case in enumerate(CASES)]


@pytest.mark.parametrize("case", CASES, ids=names())
def test_an_output_means_what_it_should(case: dict[str, Any]) -> None:
    text = case["input"]
    calls = [(call["name"], value(call["arguments"])) for call in case["calls"]]
    expected = case["content"].strip(), case["reasoning"].strip(), calls
    assert parsed(case, [text]) == expected
    assert parsed(case, list(text)) == expected
    for cut in range(1, len(text), 7):
        assert parsed(case, [text[:cut], text[cut:]]) == expected


@pytest.mark.parametrize("template", sorted({case["template"] for case in CASES}))
def test_a_format_is_the_same_each_time(template: str) -> None:
    first = format_of(template)
    assert template_format(renderer(source(template), SPECIAL), source(template)) == first
