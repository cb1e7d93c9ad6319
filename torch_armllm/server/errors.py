"""Errors, in the shape that OpenAI's clients expect."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response

logger = logging.getLogger(__name__)

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CLIENT_GONE = 499


class ApiError(Exception):
    """What a client is told instead of an answer.

    Args:
        status: of HTTP.
        message: what is wrong, and what would be right.
        param: which part of the request is meant.
        code: for programs.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def to_dict(self) -> dict[str, Any]:
        """The body of the response."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        """The response."""
        return JSONResponse(self.to_dict(), self.status, self.headers)


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


def bad_request(error: Exception, param: str | None = None) -> ApiError:
    """What was asked for cannot be done; the message says why."""
    return ApiError(400, str(error), param)


def add_error_handlers(app: FastAPI) -> None:
    """Gives all errors of an application OpenAI's shape."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RecursionError, _too_deep)
    app.add_exception_handler(ClientGone, _gone)
    app.add_exception_handler(Exception, _unexpected)


def unexpected(error: BaseException) -> ApiError:
    """An error of ours: its text is for the log alone."""
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed to answer this request; its log says why")


async def _api_error(request: Request, error: ApiError) -> Response:
    return error.response()


async def _invalid(request: Request, error: RequestValidationError) -> Response:
    faults: Sequence[dict[str, Any]] = error.errors()
    if not faults:
        return ApiError(400, "the request is not valid").response()
    shown = "; ".join(f"{_place(fault) or 'body'}: {fault['msg']}" for fault in faults[:5])
    return ApiError(400, shown, _place(faults[0])).response()


def _place(fault: Mapping[str, Any]) -> str | None:
    parts = [str(part) for part in fault["loc"] if part != "body"]
    return ".".join(parts)[:200] or None


async def _http(request: Request, error: HTTPException) -> Response:
    detail = error.detail
    if error.status_code == HTTPStatus.NOT_FOUND:
        detail = f"there is nothing at {request.method} {request.url.path[:200]}"
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        detail = f"{request.url.path} does not take {request.method}"
    return ApiError(error.status_code, str(detail), headers=error.headers).response()


async def _too_deep(request: Request, error: RecursionError) -> Response:
    return ApiError(400, "the request is nested too deeply").response()


async def _gone(request: Request, error: ClientGone) -> Response:
    return Response(status_code=_CLIENT_GONE)


async def _unexpected(request: Request, error: Exception) -> Response:
    return unexpected(error).response()
