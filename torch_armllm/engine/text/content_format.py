"""Contents of chat messages in the form that a chat template reads: texts, or lists of parts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

ContentFormat = Literal["auto", "string", "openai"]
CONTENT_FORMATS: tuple[ContentFormat, ...] = get_args(ContentFormat)

_LOOP = re.compile(
    r"\bfor\s+\w+(?:\s*,\s*\w+)?\s+in\s+[\w.\[\]'\"\\]*(?<!\w)content['\"\\]*\]?\s*(?:-?%}|\||if\b)"
)
_TAKES_TEXTS = re.compile(r"\bis\s+(?:not\s+)?string\b")


def in_content_format(
    conversation: Sequence[Mapping[str, Any]], wanted: ContentFormat, template: str
) -> list[dict[str, Any]]:
    """Returns messages whose contents have a template's form.

    Args:
        conversation: messages; their contents are texts or lists of parts.
        wanted: ``string``: texts, of which a message's parts are lines; ``openai``: lists of parts;
            ``auto``: lists as they are if the template loops over contents, and texts as parts if it knows
            no others; otherwise texts.
        template: the chat template.

    Raises:
        ValueError: the format is another, or a part is no text where texts are wanted.
    """
    if wanted not in CONTENT_FORMATS:
        raise ValueError(
            f"chat_template_content_format is {wanted!r}; give {', '.join(CONTENT_FORMATS[:-1])} or "
            f"{CONTENT_FORMATS[-1]}"
        )
    loops = wanted == "openai" or (wanted == "auto" and _LOOP.search(template) is not None)
    wraps = loops and (wanted == "openai" or _TAKES_TEXTS.search(template) is None)
    messages = []
    for message in conversation:
        content = message.get("content")
        if isinstance(content, str) and wraps:
            message = {**message, "content": [{"type": "text", "text": content}]}
        elif isinstance(content, list) and not loops:
            message = {**message, "content": "\n".join(map(_text, content))}
        messages.append(dict(message))
    return messages


def _text(part: Any) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else part
        raise ValueError(
            f"the chat template takes texts, and a content holds {kind!r}; if the template does read parts, "
            "give chat_template_content_format='openai'"
        )
    return text
