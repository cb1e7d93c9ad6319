"""Contents of chat messages: texts or parts, as a chat template reads them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from torch_armllm.engine.text.content_format import in_content_format

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
LOOPS = "{% for m in messages %}{% for part in m['content'] %}{{ part.text }}{% endfor %}{% endfor %}"
EITHER = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{%- for part in m.content if part.type == 'text' -%}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)
FILTERED = "{% set content = m['content'] %}{% for c in content | selectattr('type', 'equalto', 'text') %}"
LINES = "{% for line in m['content'].split('x') %}{% for c in m.reasoning_content %}{% if a in content %}"
PARTS: list[Any] = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("wanted", "template", "of_text", "of_parts"),
    [
        ("auto", PLAIN, "x", "a\nb"),
        ("auto", LOOPS, [{"type": "text", "text": "x"}], PARTS),
        ("auto", EITHER, "x", PARTS),
        ("auto", FILTERED, [{"type": "text", "text": "x"}], PARTS),
        ("auto", LINES, "x", "a\nb"),
        ("string", LOOPS, "x", "a\nb"),
        ("openai", PLAIN, [{"type": "text", "text": "x"}], PARTS),
    ],
    ids=["plain", "loops", "either", "filtered", "lines", "string", "openai"],
)
def test_contents_have_the_form_of_the_template(
    wanted: Any, template: str, of_text: Any, of_parts: Any
) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "user", "content": PARTS}, {"role": "assistant"}]
    found = in_content_format(messages, wanted, template)
    assert found == [
        {"role": "user", "content": of_text},
        {"role": "user", "content": of_parts},
        {"role": "assistant"},
    ]
    assert messages[1]["content"] is PARTS and messages[0]["content"] == "x"


@pytest.mark.parametrize(
    ("wanted", "part", "told"),
    [
        ("lists", PARTS[0], "chat_template_content_format is 'lists'; give auto, string or openai"),
        (
            "string",
            {"type": "image"},
            "the chat template takes texts, and a content holds 'image'; if the template does read parts, "
            "give chat_template_content_format='openai'",
        ),
        (
            "auto",
            7,
            "the chat template takes texts, and a content holds 7; if the template does read parts, "
            "give chat_template_content_format='openai'",
        ),
    ],
)
def test_what_is_refused(wanted: Any, part: Any, told: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
        in_content_format([{"role": "user", "content": [part]}], wanted, PLAIN)
