"""Hosts and origins of requests: web pages of others must not use a server that asks for no key."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from torch_armllm.server.errors import ApiError


class AllowedHosts:
    """The names by which requests may call the server.

    A page can give its own domain the address 127.0.0.1 (DNS rebinding), and then read what the server
    answers, as its browser takes both for one site.  The header ``Host`` still names the page's domain.  A
    page can send requests across sites, too, without reading the answers; the header ``Origin`` names it.

    Args:
        names: further names; ``*.example.org`` stands for all below it, ``*`` for any.
        listens: the name or address that the server was told to listen on; it is one of the names.
        has_keys: True if clients need a key, which no page of others knows.
        origins: origins of pages that may call the server.
    """

    def __init__(
        self, names: Collection[str], listens: str, has_keys: bool, origins: Collection[str]
    ) -> None:
        self._names = [name.lower().rstrip(".") for name in names]
        self._own = listens.lower()
        self._origins = origins
        self._has_keys = has_keys
        self._checks = bool(names)
        self._checks_origins = False

    def listen(self, address: str) -> None:
        """Checks requests from now on if the server listens on a loopback address, and needs no key."""
        if _is_loopback(address) and not self._has_keys:
            self._checks = self._checks_origins = True

    def check(self, headers: Headers) -> None:
        """Checks the headers of a request.

        Raises:
            ApiError: they name a host that is not allowed.
        """
        if not self._checks or "*" in self._names:
            return
        # without the header no page has sent it
        if "host" in headers and not self._allows(name := _host(f"//{headers['host']}")):
            text = (
                f"Host names {name[:100]!r}, which this server does not serve: start it with --allowed-hosts"
            )
            raise ApiError(400, text, code="host_not_allowed")
        origin = headers.get("origin")
        if origin is None or not self._checks_origins or {origin, "*"} & set(self._origins):
            return
        is_page = origin == "null" or urlsplit(origin).scheme in ("http", "https")
        if is_page and not self._allows(_host(origin)):  # others are programs, such as editors
            text = f"pages of {origin[:100]!r} may not use this server: start it with --allowed-origin"
            raise ApiError(403, text, code="origin_not_allowed")

    def _allows(self, name: str) -> bool:
        if name in ("localhost", self._own, *self._names) or name.endswith(".localhost"):
            return bool(name)
        if any(each.startswith("*.") and name.endswith(each[1:]) for each in self._names):
            return True
        return _is_loopback(name)


class Hosts:
    """ASGI middleware that refuses requests by names that are not the server's.

    Args:
        app: the application.
        allowed: the names.
    """

    def __init__(self, app: ASGIApp, allowed: AllowedHosts) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "lifespan":
            try:
                self._allowed.check(Headers(scope=scope))
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _host(url: str) -> str:
    """Returns the host of a URL, in lower case and without its port; empty if there is none."""
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""


def _is_loopback(name: str) -> bool:
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
