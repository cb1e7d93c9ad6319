"""A request on its way from the front of a Ray application to a replica."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_MEDIA = ("image_url", "input_audio", "audio_url", "video_url")
"""Fields that hold the files of parts."""


@dataclass(frozen=True)
class RelayedRequest:
    """An HTTP request.

    Attributes:
        method: such as ``POST``.
        path: such as ``/v1/completions``.
        query: what follows the question mark.
        headers: names in lower case, and values.
        body: all of it.
        text: what the model will read, as far as it is known without the model: replicas are chosen by it.
    """

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    text: bytes = b""


def model_and_text(body: bytes) -> tuple[str | None, bytes]:
    """Returns the model that a request names, and the text that its prompt begins with."""
    try:
        fields = json.loads(body)
    except ValueError:  # the replica says what is wrong with it
        return None, b""
    if not isinstance(fields, dict):
        return None, b""
    name = fields.get("model")
    given = [fields.get(name) for name in ("system", "tools", "messages", "prompt", "input")]
    text = "\n".join(piece for each in given for piece in _texts(each))
    return name if isinstance(name, str) else None, text.encode(errors="replace")


def _texts(value: Any) -> Iterator[str]:
    """Yields the texts of a value of JSON in their order, without media."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (int, float)):
        yield str(value)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, dict):
        for name, each in value.items():
            if name not in _MEDIA:
                yield from _texts(each)
