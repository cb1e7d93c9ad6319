"""From what clients say to what the engine is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch_armllm.engine.sampling_params import (
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from torch_armllm.server.errors import ApiError, bad_request
from torch_armllm.server.protocol.sampling import ResponseFormat, Sampling


def sampling_params(
    body: Sampling,
    defaults: SamplingParams,
    max_tokens: int | None,
    cap: int | None,
    **more: Any,
) -> SamplingParams:
    """Settings of a request.

    Args:
        body: what the client says.
        defaults: for what it does not say.
        max_tokens: most tokens of an answer, by the client; None: as many as the model allows.
        cap: the same, by the server.
        more: settings that go by other names in different routes.

    Raises:
        ApiError: a setting is out of its range or contradicts another.
    """
    limits = [limit for limit in (max_tokens, cap) if limit is not None]
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    said = body.said()
    said["max_tokens"] = min(limits, default=None)
    said["logit_bias"] = _bias(body.logit_bias)
    said["structured_outputs"] = structured(body)
    said.update({name: value for name, value in more.items() if value is not None})
    try:
        return replace(defaults, output_kind=kind, **said)
    except ValueError as error:
        raise bad_request(error) from error


def structured(body: Sampling) -> StructuredOutputsParams | None:
    """What answers must match, if anything.

    Raises:
        ApiError: it says nothing, or two things at once.
    """
    format_ = body.response_format
    by_format = _by_format(format_) if format_ is not None else None
    if body.structured_outputs is None:
        return by_format
    if by_format is not None:
        raise ApiError(400, "give response_format or structured_outputs, not both", "response_format")
    given = body.structured_outputs
    try:
        return StructuredOutputsParams(
            json=given.json_,
            regex=given.regex,
            choice=given.choice,
            grammar=given.grammar,
            json_object=given.json_object,
        )
    except ValueError as error:
        raise bad_request(error, "structured_outputs") from error


def _by_format(wanted: ResponseFormat) -> StructuredOutputsParams | None:
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    if wanted.type != "json_schema":
        text = f"response_format.type is {wanted.type[:50]!r}; give text, json_object or json_schema"
        raise ApiError(400, text, "response_format.type")
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise ApiError(400, "json_schema needs a schema", "response_format.json_schema.schema")
    return StructuredOutputsParams(json=wanted.json_schema.schema_)


def _bias(given: Mapping[str, float] | None) -> dict[int, float] | None:
    if not given:
        return None
    wrong = next((token for token in given if not token.isascii() or not token.isdigit()), None)
    if wrong is not None or any(len(token) > 10 for token in given):
        raise ApiError(400, 'logit_bias takes token ids, such as {"42": -100}', "logit_bias")
    return {int(token): bias for token, bias in given.items()}
