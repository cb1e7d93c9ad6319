"""Route of the chat page."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

router = APIRouter()

_PAGE = Path(__file__).parent.parent / "page.html"


@router.get("/", include_in_schema=False, response_model=None)
async def page() -> Response:
    """Returns the page, with a policy that permits only its own script and requests to this server."""
    text, policy = _page()
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response(text, media_type="text/html; charset=utf-8", headers=headers)


@cache
def _page() -> tuple[bytes, str]:
    text = _PAGE.read_bytes()
    sources = {tag: f"'sha256-{_digest(text, tag)}'" for tag in ("script", "style")}
    policy = (
        f"default-src 'none'; script-src {sources['script']}; style-src {sources['style']}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text, policy


def _digest(text: bytes, tag: str) -> str:
    (content,) = re.findall(rb"<%b>(.*?)</%b>" % (tag.encode(), tag.encode()), text, re.DOTALL)
    return base64.b64encode(hashlib.sha256(content).digest()).decode()
