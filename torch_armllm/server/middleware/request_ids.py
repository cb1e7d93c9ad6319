"""Ids of requests, in the headers of their responses and in the log."""

from __future__ import annotations

import logging
import re
import time
import uuid
from contextvars import ContextVar

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"
TIME_HEADER = "openai-processing-ms"
_ANTHROPIC_HEADER = "request-id"
_SANE = re.compile(r"[!-~]{1,128}")
_KEY = "armllm.request_id"

logger = logging.getLogger(__name__)
_CURRENT: ContextVar[str] = ContextVar("request_id", default="")


class RequestIds:
    """ASGI middleware that gives every response the id of its request, and the time until it began.

    The id is the client's own `x-request-id` where that is up to 128 visible ASCII characters, and a new one
    elsewhere.

    Args:
        app: the application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        name = given if _SANE.fullmatch(given) else f"req_{uuid.uuid4().hex}"
        scope[_KEY] = name
        _CURRENT.set(name)
        began = time.perf_counter()

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                milliseconds = round(1000 * (time.perf_counter() - began))
                logger.debug(
                    "%s %s: %s %.200s: %d after %d ms",
                    HEADER,
                    name,
                    scope["method"],
                    ascii(scope["path"]),
                    message["status"],
                    milliseconds,
                )
                added = {HEADER: name, TIME_HEADER: str(milliseconds)}
                if scope["path"].startswith("/v1/messages"):
                    added[_ANTHROPIC_HEADER] = name
                message["headers"] = [
                    *message["headers"],
                    *((key.encode(), value.encode()) for key, value in added.items()),
                ]
            await send(message)

        await self._app(scope, receive, named)


def request_id() -> str:
    """Returns the id of the request that is being handled; empty outside of one."""
    return _CURRENT.get()


def id_headers(scope: Scope) -> dict[str, str]:
    """Returns the header of a response that passes no middleware, as those to unexpected errors."""
    return {HEADER: scope[_KEY]} if _KEY in scope else {}
