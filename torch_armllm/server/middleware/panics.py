"""Panics of Rust libraries while a request is handled."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from torch_armllm.system.panics import PANICS_AS_ERRORS


class Panics:
    """ASGI middleware that lets the handlers of errors see a panic, which they otherwise would not.

    Args:
        app: the application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        with PANICS_AS_ERRORS:
            await self._app(scope, receive, send)
