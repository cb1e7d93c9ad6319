"""Places of images and sound in conversations, by templates that show them and others."""

from __future__ import annotations

from typing import Any

import pytest

from torch_armllm.engine.images.media_places import placed

PARTS = (
    "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% else %}"
    "<{{ p.type }}>{% endif %}{% endfor %}{% endfor %}"
)
TEXT_PARTS = (
    "{% for m in messages %}{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}{% endfor %}"
)
STRINGS = "{% for m in messages %}{{ '[' + m.content + ']' }}{% endfor %}"
PRINTED = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
MARKS = {"audio": "<|audio|>", "image": "<image>"}


def user(*content: Any) -> list[dict[str, Any]]:
    parts = [{"type": "text", "text": each} if isinstance(each, str) else each for each in content]
    return [{"role": "system", "content": "be brief"}, {"role": "user", "content": parts}]


AUDIO, IMAGE = {"type": "audio"}, {"type": "image"}


def test_templates_that_show_parts_get_them() -> None:
    messages = user("hear", AUDIO, IMAGE)
    assert placed(messages, PARTS, {}, {}) == (messages, "openai")


def test_templates_that_leave_parts_out_get_placeholders_as_texts() -> None:
    shown = placed(user("hear", AUDIO, "this"), TEXT_PARTS, {}, MARKS)
    assert shown.content_format == "openai"
    assert [part["text"] for part in shown.messages[1]["content"]] == ["hear", "<|audio|>", "this"]


@pytest.mark.parametrize("template", [STRINGS, PRINTED], ids=["added", "printed"])
def test_templates_of_texts_get_texts(template: str) -> None:
    shown = placed(user("hear", AUDIO, IMAGE, "this", "well"), template, {}, MARKS)
    assert shown.content_format == "string"
    assert [message["content"] for message in shown.messages] == [
        "be brief",
        "hear<|audio|><image>this\nwell",
    ]


@pytest.mark.parametrize("template", [TEXT_PARTS, STRINGS], ids=["parts", "strings"])
def test_placeholders_that_users_wrote_are_those_of_their_media(template: str) -> None:
    shown = placed(user("first <|audio|> then", AUDIO, AUDIO), template, {}, MARKS)
    content = shown.messages[1]["content"]
    texts = content if isinstance(content, str) else "".join(part["text"] for part in content)
    assert texts == "first <|audio|> then<|audio|>"


def test_a_placeholder_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(
        ValueError, match="shows no audio clips, and the model's processor names no placeholder"
    ):
        placed(user("hear", AUDIO), TEXT_PARTS, {}, {"image": "<image>"})
