"""A header that warns: of unknown fields, and of what the model sees otherwise than it was sent."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "X-Armllm-Warning"
_MOST = 8
"""Names that a header has at most."""


@dataclass
class _Warnings:
    fields: dict[str, str] = field(default_factory=dict)  # texts by path
    texts: list[str] = field(default_factory=list)

    def header(self) -> str:
        """Returns the header's text; empty if there is nothing to warn of."""
        texts = list(dict.fromkeys(self.texts))
        if self.fields:
            more = f", and {len(self.fields) - _MOST} more" if len(self.fields) > _MOST else ""
            named = ", ".join(list(self.fields.values())[:_MOST])
            texts.append(f"unknown fields are ignored: {named}{more}")
        return "; ".join(texts)


_FOUND: ContextVar[_Warnings | None] = ContextVar("warnings", default=None)


def note_warnings(texts: Iterable[str]) -> None:
    """Notes texts for the header of the response to the request at hand, all ASCII."""
    if (found := _FOUND.get()) is not None:
        found.texts += texts


def note_unknown(given: Iterable[str], known: Collection[str], path: str = "") -> None:
    """Notes fields of the request at hand that are not known, each with the known name that it is like.

    Args:
        given: names of the fields.
        known: names of those that the schema has.
        path: of the part of the request that has them, with a dot at its end.
    """
    found = _FOUND.get()
    if found is None:
        return
    fields = found.fields
    for name in given:
        if name in known or (shown := path + _printable(name)) in fields:
            continue
        like = difflib.get_close_matches(name[:64], known, 1) if len(fields) < _MOST else ()
        fields[shown] = f"{shown} (did you mean {like[0]}?)" if like else shown


class WarningHeader:
    """ASGI middleware that adds a header with what was noted about a request until its response begins.

    Unknown fields are ignored, as OpenAI's clients expect of servers that lack some, and a mistyped name
    would change the answer unseen.

    Args:
        app: the application; its schemas call `note_unknown`, and its prompts `note_warnings`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        found = _Warnings()
        _FOUND.set(found)

        async def warned(message: Message) -> None:
            if message["type"] == "http.response.start" and (text := found.header()):
                message["headers"] = [*message["headers"], (HEADER.lower().encode(), text.encode())]
            await send(message)

        await self._app(scope, receive, warned)


def _printable(name: str) -> str:
    """Returns a name as a header can hold it: quoted and escaped, unless it is visible ASCII."""
    return name[:64] if re.fullmatch("[!-~]+", name[:64]) else ascii(name[:64])
