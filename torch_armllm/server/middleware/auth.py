"""Who may use the server."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from torch_armllm.server.errors import ApiError

OPEN_PATHS = frozenset({"/", "/health"})
"""Answered without a key: the page asks for one itself, and holds nothing that is secret."""


class Authentication:
    """Lets requests through that bring a key, and those to open paths.

    Args:
        app: what is protected.
        keys: any of them will do.
        open_paths: need none.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str], open_paths: Collection[str] = OPEN_PATHS) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            given = Headers(scope=scope).get("authorization", "").encode("latin-1")  # as it came
            scheme, _, key = given.partition(b" ")
            if scheme.lower() != b"bearer" or not self._is_known(key.strip()):
                await _refusal(bool(key)).response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_known(self, key: bytes) -> bool:
        """Takes the same time whatever the key and its length, and however many there are."""
        digest = _digest(key)
        known = False
        for own in self._digests:
            known |= hmac.compare_digest(own, digest)
        return known


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _refusal(given: bool) -> ApiError:
    text = "this API key is not known" if given else "give an API key: Authorization: Bearer KEY"
    return ApiError(401, text, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
