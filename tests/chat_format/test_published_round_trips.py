"""Random calls that published templates render are parsed back, wherever the text is cut."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.chat_format.test_published_templates import FOLDER, SPECIAL, format_of, source
from torch_armllm.chat_format.prompt_part import begins_in
from torch_armllm.chat_format.rendering import make_parser, renderer
from torch_armllm.engine.text.template_process import TemplateError

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"{FOLDER} is missing: it holds the templates")
TEMPLATES = sorted(file.name for file in (FOLDER / "templates").iterdir()) if FOLDER.is_dir() else []
SCHEMAS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "metric": {"type": "boolean"},
        },
        "required": ["city"],
    },
    "edit-file": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "changes": {
                "type": "array",
                "items": {"type": "object", "properties": {"new": {"type": "string"}}},
            },
            "ratio": {"type": "number"},
        },
        "required": ["path"],
    },
    "ping": {"type": "object", "properties": {}},
}
STRINGS = (
    "Paris",
    "New York",
    'O\'Brien "quoted"',
    "one\ntwo",
    "def f(x):\n    return {'a': [1, 2], \"b\": x < 3 and x > 1}",
    "<b>bold</b> & <i>x</i>",
    '{"json": true}',
    "123",
    "true",
    "null",
    "naïve 日本 🎉",
    "a, b=3)",
    "",
)
MESSAGES = 8


def arguments(schema: Any, draw: random.Random) -> Any:
    """Draws a value of a schema; optional fields may be missing."""
    kind = schema["type"]
    if kind == "object":
        needed = schema.get("required", ())
        return {
            key: arguments(inner, draw)
            for key, inner in schema["properties"].items()
            if key in needed or draw.random() < 0.6
        }
    if kind == "array":
        return [arguments(schema["items"], draw) for _ in range(draw.randint(0, 2))]
    drawn = {
        "string": draw.choice(STRINGS),
        "integer": draw.randint(-5, 10**6),
        "number": -2.25,
        "boolean": True,
    }
    return drawn[kind]


def rendered(template: str, calls: list[tuple[str, Any]], content: str) -> tuple[str, str] | None:
    """Returns the prompt and the output that a template renders; None if it shows no such calls."""
    render = renderer(source(template), SPECIAL)
    tools = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in SCHEMAS.items()]
    for tool in tools:
        tool["function"]["description"] = "does something"
    said = [
        {"id": f"call{i:05d}", "type": "function", "function": {"name": name, "arguments": given}}
        for i, (name, given) in enumerate(calls)
    ]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Hey"}]
    try:
        begun = render(messages, tools=tools, add_generation_prompt=True, enable_thinking=False)
        whole = render(
            [*messages, {"role": "assistant", "content": content, "tool_calls": said}],
            tools=tools,
            enable_thinking=False,
        )
    except (ValueError, TemplateError):
        return None
    same = next((i for i, (a, b) in enumerate(zip(begun, whole, strict=False)) if a != b), len(begun))
    while same and same < len(begun) and whole[same - 1] not in ">\n":  # not within a marker
        same -= 1
    output = whole[same:]
    shown = all(output.count(name) >= [n for n, _ in calls].count(name) for name, _ in calls)
    return (whole[:same], output) if shown else None


@pytest.mark.parametrize("template", TEMPLATES)
def test_calls_are_parsed_back(template: str) -> None:
    format, draw = format_of(template), random.Random(template)
    if format.calls is None:
        pytest.skip("its calls are not known")
    shown = 0
    for _ in range(MESSAGES):
        names = draw.choices(list(SCHEMAS), k=draw.choice((1, 1, 2, 3)))
        calls = [(name, arguments(SCHEMAS[name], draw)) for name in names]
        found = rendered(template, calls, draw.choice(("", "Let me look.")))
        if found is None:
            continue
        shown += 1
        prompt, output = found
        parser = make_parser(format, SCHEMAS, begins_in=begins_in(format, prompt))
        got: dict[int, list[str]] = {}
        while output:
            size = draw.randint(1, 9)
            deltas, output = [parser.feed(output[:size])], output[size:]
            if not output:
                deltas.append(parser.finish())
            for call in (call for delta in deltas for call in delta.calls):
                got.setdefault(call.index, [call.name or "", ""])[1] += call.arguments
        assert [(name, json.loads(text)) for name, text in got.values()] == calls, found[1]
    if not shown:
        pytest.skip("its template shows no calls")
