"""Base classes of the request schemas."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from torch_armllm.server.middleware.unknown_fields import note_unknown
from torch_armllm.server.protocol.descriptions import describe

MAX_PROMPTS = 2048
MAX_CHOICES = 128
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Schema = dict[str, Any]


class RequestPart(BaseModel):
    """A part of a request: types are strict, and unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, json_schema_extra=describe)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, given: Any) -> Any:
        """Takes null for a field that is left out: clients send their optional arguments so."""
        if not isinstance(given, dict) or all(value is not None for value in given.values()):
            return given
        optional = _optional_fields(cls)
        return {name: value for name, value in given.items() if value is not None or name not in optional}


class RequestBody(RequestPart):
    """A request.

    Attributes:
        model: a name that `/v1/models` lists; None: the model that was loaded first.
        user: identifier of the end user; ignored.
    """

    model: str | None = None
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _note_unknown(cls, given: Any) -> Any:
        """Notes fields that the schema lacks, for the response's header."""
        if isinstance(given, dict):
            known = {field.alias or name for name, field in cls.model_fields.items()}
            note_unknown((name for name in given if isinstance(name, str)), known)
        return given


@cache
def _optional_fields(part: type[BaseModel]) -> frozenset[str]:
    """Returns the names in requests of the fields that may be left out."""
    fields = part.model_fields.items()
    return frozenset(field.alias or name for name, field in fields if not field.is_required())
