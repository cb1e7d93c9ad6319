"""Middleware that counts requests by their route and the status of the response."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

OTHER = "other"
"""Stands for all paths that the server does not have, as clients may ask for any number of them."""


class RequestCounts:
    """Counts the responses of the application within.

    Args:
        app: the application within.
        paths: paths of the server's routes.
        count: called with the path of the route and the status of each response that begins.
    """

    def __init__(self, app: ASGIApp, paths: Iterable[str], count: Callable[[str, int], object]) -> None:
        self._app = app
        self._paths = frozenset(paths)
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._count(self._path(scope), message["status"])
            await send(message)

        await self._app(scope, receive, counted)

    def _path(self, scope: Scope) -> str:
        """Returns the path of the route; responses of other middleware have none but the request's own."""
        path = getattr(scope.get("route"), "path", scope["path"])
        return path if path in self._paths else OTHER
