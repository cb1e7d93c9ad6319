"""Conversion of request fields to `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch_armllm.engine.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from torch_armllm.engine.text.tokenization import Tokenization
from torch_armllm.llm.beam_search import BeamSearchParams
from torch_armllm.server.constraints import constraint
from torch_armllm.server.errors import ApiError, bad_request
from torch_armllm.server.protocol.sampling import ResponseFormat, SamplingRequest

_NOT_OF_BEAMS = (
    *("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "stop"),
    *("stop_token_ids", "bad_words", "allowed_token_ids", "logit_bias", "min_tokens", "prompt_logprobs"),
    *("thinking_token_budget", "extra_args"),
)
_NEUTRAL = SamplingParams()


def sampling_params(
    body: SamplingRequest,
    defaults: SamplingParams,
    max_tokens: int | None,
    server_max_tokens: int | None,
    **more: Any,
) -> SamplingParams:
    """Returns the sampling parameters of a request.

    Args:
        body: the request.
        defaults: values of the parameters that the request leaves out.
        max_tokens: the request's limit of output tokens; None: as many as the model allows.
        server_max_tokens: the server's limit of output tokens; None: no limit.
        more: parameters whose field names differ between routes.

    Raises:
        ApiError: a parameter is out of range or contradicts another.
    """
    limits = [limit for limit in (max_tokens, server_max_tokens) if limit is not None]
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    settings = body.explicit_settings()
    settings["max_tokens"] = min(limits, default=None)
    settings["logit_bias"] = _parse_logit_bias(body.logit_bias)
    settings["structured_outputs"] = structured_outputs(body)
    settings.update({name: value for name, value in more.items() if value is not None})
    if body.use_beam_search:
        settings["temperature"] = 1.0  # or several outputs would be the same
    try:
        return replace(defaults, output_kind=kind, **settings)
    except ValueError as error:
        raise bad_request(error) from error


def beam_search_params(
    body: SamplingRequest, params: SamplingParams, width: int | None, max_model_len: int
) -> BeamSearchParams | None:
    """Returns the settings of a request's beam search; None if it does not ask for one.

    Args:
        body: the request.
        params: its sampling parameters.
        width: number of beams; None: of outputs.
        max_model_len: most output tokens where the request has no limit.

    Raises:
        ApiError: the request has a field that a beam search has no use for.
    """
    if not body.use_beam_search:
        if "length_penalty" in body.model_fields_set and body.length_penalty != 1:
            raise ApiError(400, "length_penalty is for beam search; set use_beam_search", "length_penalty")
        return None
    for name in _NOT_OF_BEAMS:
        if getattr(params, name) not in (None, getattr(_NEUTRAL, name)) and name in body.model_fields_set:
            raise ApiError(400, f"{name} has no meaning in a beam search; leave it out", name)
    if params.structured_outputs is not None:
        message = "beams are not bound to a format; leave out formats and demanded tools, or use_beam_search"
        raise ApiError(400, message, "use_beam_search")
    try:
        return BeamSearchParams(
            width or params.n,
            params.max_tokens or max_model_len,
            ignore_eos=params.ignore_eos,
            temperature=body.temperature or 0.0,
            length_penalty=body.length_penalty,
            include_stop_str_in_output=params.include_stop_str_in_output,
        )
    except ValueError as error:
        raise bad_request(error, "temperature") from error


def tokenization(
    body: SamplingRequest, params: SamplingParams, max_model_len: int, add_special_tokens: bool = True
) -> tuple[Tokenization, int | None]:
    """Returns how a request's prompts are tokenized, and the number of tokens to which they are cut.

    Raises:
        ApiError: more tokens are to be kept than the model takes.
    """
    try:
        how = Tokenization(add_special_tokens, body.truncate_prompt_tokens)
        return how, how.most_tokens(max_model_len, params.max_tokens)
    except ValueError as error:
        raise bad_request(error, "truncate_prompt_tokens") from error


def structured_outputs(body: SamplingRequest) -> StructuredOutputsParams | None:
    """Returns the constraint on the output; None if there is none.

    Raises:
        ApiError: the constraint is empty, or given twice.
    """
    response_format = body.response_format
    from_format = _from_response_format(response_format) if response_format is not None else None
    if body.structured_outputs is None:
        return from_format
    if from_format is not None:
        raise ApiError(400, "give response_format or structured_outputs, not both", "response_format")
    given = body.structured_outputs
    return constraint(
        "structured_outputs",
        json=given.json_,
        regex=given.regex,
        choice=given.choice,
        grammar=given.grammar,
        json_object=given.json_object,
        structural_tag=given.structural_tag,
        whitespace_pattern=given.whitespace_pattern,
    )


def _from_response_format(response_format: ResponseFormat) -> StructuredOutputsParams | None:
    if response_format.type == "text":
        return None
    if response_format.type == "json_object":
        if response_format.schema_ is not None:
            return constraint("response_format", json=response_format.schema_)
        return StructuredOutputsParams(json_object=True)
    if response_format.type == "structural_tag":
        tag = response_format.model_dump(include={"triggers", "structures", "format"})
        return constraint("response_format", structural_tag=tag)
    if response_format.type != "json_schema":
        text = (
            f"response_format.type is {response_format.type[:50]!r}; give text, json_object, json_schema or "
            "structural_tag"
        )
        raise ApiError(400, text, "response_format.type")
    named = response_format.json_schema
    schema = response_format.schema_ if named is None else named.schema_
    if schema is None:
        raise ApiError(400, "json_schema needs a schema", "response_format.json_schema.schema")
    return constraint("response_format", json=schema)


def _parse_logit_bias(logit_bias: Mapping[str, float] | None) -> dict[int, float] | None:
    if not logit_bias:
        return None
    invalid = next((token for token in logit_bias if not token.isascii() or not token.isdigit()), None)
    if invalid is not None or any(len(token) > 10 for token in logit_bias):
        raise ApiError(400, 'logit_bias maps token ids to biases, such as {"42": -100}', "logit_bias")
    return {int(token): bias for token, bias in logit_bias.items()}
