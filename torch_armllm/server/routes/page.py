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

_FOLDER = Path(__file__).parent.parent / "page"
_LIBRARIES = ("marked.umd.js", "purify.min.js")
"""Published files of marked and DOMPurify, unchanged; their licenses lie beside them."""


@router.get("/", include_in_schema=False, response_model=None)
async def page() -> Response:
    """Returns the page, with a policy that permits only its own scripts and requests to this server."""
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
    """Returns the page as one file, and its policy.

    No script can turn text into elements but DOMPurify, whose policy of trusted types is the only one.
    """
    libraries = b"\n".join(b"<script>%b</script>" % _library(name) for name in _LIBRARIES)
    text = (_FOLDER / "index.html").read_bytes().replace(b"<!-- libraries -->", libraries)
    sources = {
        tag: " ".join(f"'sha256-{each}'" for each in _digests(text, tag)) for tag in ("script", "style")
    }
    policy = (
        f"default-src 'none'; script-src {sources['script']}; style-src {sources['style']}; "
        "connect-src 'self'; img-src data:; media-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dompurify"
    )
    return text, policy


def _library(name: str) -> bytes:
    """Returns a library as the content of an element, without the address of its source map."""
    text = (_FOLDER / "libraries" / name).read_bytes()
    assert b"<script" not in text and b"</script" not in text, f"{name} would end its element"
    return re.sub(rb"\n//# sourceMappingURL=.*", b"", text)


def _digests(text: bytes, tag: str) -> list[str]:
    contents = re.findall(rb"<%b>(.*?)</%b>" % (tag.encode(), tag.encode()), text, re.DOTALL)
    return [base64.b64encode(hashlib.sha256(content).digest()).decode() for content in contents]
