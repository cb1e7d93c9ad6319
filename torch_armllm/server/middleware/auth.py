"""API-key authentication."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from torch_armllm.server.client_limits import CLIENT
from torch_armllm.server.errors import ApiError

OPEN_PATHS = frozenset({"/", "/health", "/ping"})
"""Paths that need no key; the page prompts for a key itself, and contains no secret."""


ADMIN_PATHS = ("/v1/admin", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""Prefixes of the admin routes' paths."""


class Authentication:
    """ASGI middleware that requires an API key for all but the open paths.

    Admin routes have a key of their own: no client's key opens them, and theirs opens nothing else.  Without
    an admin key they refuse every request themselves.

    Args:
        app: the protected application.
        keys: the clients' keys; if empty, no key is required.
        admin_key: key of the admin routes; None: they are off.
        open_paths: paths that need no key.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Iterable[str],
        admin_key: str | None = None,
        open_paths: Collection[str] = OPEN_PATHS,
    ) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]
        self._admin_digests = [] if admin_key is None else [_digest(admin_key.encode())]
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        digests = self._accepted(scope["path"]) if scope["type"] == "http" else []
        if digests:
            # latin-1 restores the bytes that were sent
            headers = Headers(scope=scope)
            header = headers.get("authorization", "").encode("latin-1")
            if not header and "x-api-key" in headers:  # Anthropic's clients
                header = b"Bearer " + headers["x-api-key"].encode("latin-1")
            scheme, _, key = header.partition(b" ")
            client = _digest(key.strip())
            if scheme.lower() != b"bearer" or not _is_accepted(client, digests):
                await _refusal(bool(key)).response()(scope, receive, send)
                return
            CLIENT.set(client)
        await self._app(scope, receive, send)

    def _accepted(self, path: str) -> list[bytes]:
        """Returns the digests of the keys that open a path; empty if it needs no key."""
        if path.startswith(ADMIN_PATHS):
            return self._admin_digests or self._digests
        return [] if path in self._open_paths else self._digests


def _is_accepted(digest: bytes, digests: Iterable[bytes]) -> bool:
    """True if a key's digest is among others; takes the same time for every key, whatever its length."""
    valid = False
    for accepted in digests:
        valid |= hmac.compare_digest(accepted, digest)
    return valid


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _refusal(has_key: bool) -> ApiError:
    text = "the API key is not valid" if has_key else "an API key is required: send Authorization: Bearer KEY"
    return ApiError(401, text, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
