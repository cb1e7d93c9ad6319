"""What all requests have in common."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

MOST_PROMPTS = 2048
MOST_CHOICES = 128
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Schema = dict[str, Any]


class Part(BaseModel):
    """A part of a request: types are as JSON has them, and fields that are not known are left alone."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class Body(Part):
    """A request.

    Attributes:
        model: by the name that `/v1/models` tells; none: the only one.
        user: whom the request is made for; not regarded.
    """

    model: str | None = None
    user: str | None = None
