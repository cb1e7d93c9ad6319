"""Route of the API's documentation: Swagger UI over `/openapi.json`, without files of other hosts."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import Response

from torch_armllm.server.errors import ApiError
from torch_armllm.system.extras import install_command, is_installed

router = APIRouter(prefix="/docs", include_in_schema=False)

_LIBRARY = "fastapi_offline"
_TYPES = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}
"""Files of Swagger UI, which the package fastapi-offline brings, and their media types."""


@router.get("", response_model=None)
async def page() -> Response:
    """Returns the page, with a policy that permits only its own scripts and requests to this server."""
    _check_installed()
    text, policy = _page()
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
    return Response(text, media_type="text/html; charset=utf-8", headers=headers)


@router.get("/{name}", response_model=None)
async def file(name: str) -> Response:
    """Returns a file of Swagger UI."""
    if name not in _TYPES:
        raise ApiError(404, f"no such file: {name[:200]}")
    _check_installed()
    content = files(_LIBRARY).joinpath("static").joinpath(name).read_bytes()
    headers = {"Cache-Control": "max-age=86400", "X-Content-Type-Options": "nosniff"}
    return Response(content, media_type=f"{_TYPES[name]}; charset=utf-8", headers=headers)


def _check_installed() -> None:
    if not is_installed(_LIBRARY):
        remedy = install_command("serve")
        raise ApiError(501, f"this page needs fastapi-offline: {remedy}; /openapi.json does not")


@cache
def _page() -> tuple[bytes, str]:
    # relative addresses: a proxy may serve all of this below a path of its own
    made = get_swagger_ui_html(
        openapi_url="openapi.json",
        title="torch_armllm",
        swagger_js_url="docs/swagger-ui-bundle.js",
        swagger_css_url="docs/swagger-ui.css",
        swagger_favicon_url="data:,",
        swagger_ui_parameters={"validatorUrl": None},
    )
    text = bytes(made.body)
    (script,) = re.findall(rb"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'self' 'sha256-{digest}'; style-src 'self' 'unsafe-inline'; "
        "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return text, policy
