"""Base classes of the request schemas."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from torch_armllm.server.middleware.warnings import note_unknown
from torch_armllm.server.protocol.descriptions import describe

_MOST_LEVELS = 8
"""Levels of parts in parts that are searched for unknown fields."""
_NOTHING: tuple[Any, ...] = (None, [], {})
MAX_PROMPTS = 2048
MAX_CHOICES = 128
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Schema = dict[str, Any]


class RequestPart(BaseModel):
    """A part of a request: types are strict, and unknown fields are ignored, and named in a header."""

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
            _note_unknown_of(cls, given, "", _MOST_LEVELS)
        return given


def _note_unknown_of(part: type[BaseModel], given: dict[str, Any], path: str, levels: int) -> None:
    """Notes fields of a part and of the parts in it; those without a value ask for nothing."""
    known = _fields_of(part)
    named = (name for name, value in given.items() if isinstance(name, str) and value not in _NOTHING)
    note_unknown(named, known, path)
    for name, inner in known.items():
        value = given.get(name)
        if not inner or not levels:
            continue
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, dict):
                # of several kinds the one that it is most like
                kind = max(inner, key=lambda part: len(_fields_of(part).keys() & each.keys()))
                _note_unknown_of(kind, each, f"{path}{name}.", levels - 1)


@cache
def _fields_of(part: type[BaseModel]) -> dict[str, tuple[type[RequestPart], ...]]:
    """Returns the names of a part's fields, each with the kinds of parts that it may hold."""
    return {field.alias or name: _parts_in(field.annotation) for name, field in part.model_fields.items()}


def _parts_in(annotation: Any) -> tuple[type[RequestPart], ...]:
    """Returns the kinds of parts that a field may hold, alone or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, RequestPart):
        return (annotation,)
    return tuple(part for each in get_args(annotation) for part in _parts_in(each))


@cache
def _optional_fields(part: type[BaseModel]) -> frozenset[str]:
    """Returns the names in requests of the fields that may be left out."""
    fields = part.model_fields.items()
    return frozenset(field.alias or name for name, field in fields if not field.is_required())
