"""Schema of errors, in OpenAI's format."""

from __future__ import annotations

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    """An error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of a response that is an error; `/v1/messages` adds Anthropic's `type`."""

    error: ErrorDetail
