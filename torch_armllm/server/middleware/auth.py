"""API-key authentication."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from torch_armllm.server.errors import ApiError

OPEN_PATHS = frozenset({"/", "/health"})
"""Paths that need no key; the page prompts for a key itself, and contains no secret."""


class Authentication:
    """ASGI middleware that requires an API key for all but the open paths.

    Args:
        app: the protected application.
        keys: the accepted keys.
        open_paths: paths that need no key.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str], open_paths: Collection[str] = OPEN_PATHS) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            # latin-1 restores the bytes that were sent
            header = Headers(scope=scope).get("authorization", "").encode("latin-1")
            scheme, _, key = header.partition(b" ")
            if scheme.lower() != b"bearer" or not self._is_valid(key.strip()):
                await _refusal(bool(key)).response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_valid(self, key: bytes) -> bool:
        """True if the key is accepted; takes the same time for every key, whatever its length."""
        digest = _digest(key)
        valid = False
        for accepted in self._digests:
            valid |= hmac.compare_digest(accepted, digest)
        return valid


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _refusal(has_key: bool) -> ApiError:
    text = "the API key is not valid" if has_key else "an API key is required: send Authorization: Bearer KEY"
    return ApiError(401, text, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
