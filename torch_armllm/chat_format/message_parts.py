"""Contents of messages that are put together: texts, or lists of parts."""

from __future__ import annotations

from typing import Any

from torch_armllm.chat_format.template_traits import Message

_BETWEEN = "\n\n"


def joined(first: Any, second: Any) -> Any:
    """Returns two contents as one, with an empty line between: texts, lists of parts or nothing."""
    if not first or not second:
        return first or second or ""
    if isinstance(first, str) and isinstance(second, str):
        return first + _BETWEEN + second
    return [*_parts(first), *_parts(second)]


def text_of(content: Any) -> str:
    """Returns the texts of a content, as lines."""
    if not isinstance(content, list):
        return content or ""
    return "\n".join(part.get("text") or "" for part in content if part.get("type") == "text")


def is_text(content: Any) -> bool:
    """True if a content is a text, or parts that are all texts."""
    return not isinstance(content, list) or all(part.get("type") == "text" for part in content)


def in_form(message: Message, parts: frozenset[str], texts: frozenset[str]) -> Message:
    """Returns a message whose content has the form that a template takes of its role.

    Args:
        message: the message; a content with other parts than texts is left as it is.
        parts: roles whose contents may be lists of parts.
        texts: roles whose contents may be texts.
    """
    content, role = message.get("content"), message["role"]
    if isinstance(content, str) and role not in texts and role in parts:
        return {**message, "content": [{"type": "text", "text": content}]}
    if isinstance(content, list) and role not in parts and is_text(content):
        return {**message, "content": text_of(content)}
    return message


def _parts(content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
