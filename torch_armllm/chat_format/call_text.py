"""Text of tool calls in a model's own format, for templates that show none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from torch_armllm.chat_format.format import INDEX, CallFormat


def call_text(format: CallFormat, calls: Sequence[tuple[str, dict[str, Any]]], first: int = 0) -> str | None:
    """Returns calls as a model writes them; None for a syntax that is not written here.

    Args:
        format: one whose calls are JSON, Python, or a name and JSON: those of `known`'s templates.
        calls: name and arguments of each.
        first: calls before these in the conversation, which ids count.
    """
    texts = []
    for number, (name, arguments) in enumerate(calls, first):
        if format.kind == "json":
            text = _json({format.json.name: name, format.json.arguments: arguments})
        elif format.kind == "tag_json":
            text = name + format.name_end.replace(INDEX, str(number)) + _json(arguments)
        elif format.kind == "python" and all(key.isidentifier() for key in arguments):
            text = f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        else:
            return None
        texts.append(format.begin + text + format.end)
    return format.section_begin + format.separator.join(texts) + format.section_end


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
