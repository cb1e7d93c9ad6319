"""A header that names the fields of a request that no schema knows."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable
from contextvars import ContextVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "X-Armllm-Warning"
_MOST = 8
"""Names that a header has at most."""

_FOUND: ContextVar[dict[str, str] | None] = ContextVar("unknown_fields", default=None)


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
    for name in given:
        if name in known or (shown := path + _printable(name)) in found:
            continue
        like = difflib.get_close_matches(name[:64], known, 1) if len(found) < _MOST else ()
        found[shown] = f"{shown} (did you mean {like[0]}?)" if like else shown


class UnknownFields:
    """ASGI middleware that answers a request with unknown fields with a header that names them.

    They are ignored, as OpenAI's clients expect of servers that lack some, and a mistyped name would change
    the answer unseen.

    Args:
        app: the application; its schemas call `note_unknown`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        found: dict[str, str] = {}  # texts by path
        _FOUND.set(found)

        async def warned(message: Message) -> None:
            if found and message["type"] == "http.response.start":
                more = f", and {len(found) - _MOST} more" if len(found) > _MOST else ""
                text = f"unknown fields are ignored: {', '.join(list(found.values())[:_MOST])}{more}"
                message["headers"] = [*message["headers"], (HEADER.lower().encode(), text.encode())]
            await send(message)

        await self._app(scope, receive, warned)


def _printable(name: str) -> str:
    """Returns a name as a header can hold it: quoted and escaped, unless it is visible ASCII."""
    return name[:64] if re.fullmatch("[!-~]+", name[:64]) else ascii(name[:64])
