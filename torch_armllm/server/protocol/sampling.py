"""Sampling fields that all generating requests share."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator
from typing_extensions import Self

from torch_armllm.engine.sampling_params import SamplingParams, StructuredOutputsParams
from torch_armllm.server.errors import ApiError
from torch_armllm.server.protocol.body import MAX_CHOICES, RequestBody, RequestPart, Schema, TokenId

_Text = Annotated[str, Field(min_length=1)]
_Texts = Annotated[list[_Text], Field(max_length=64)]


class StreamOptions(RequestPart):
    """Options of a stream.

    Attributes:
        include_usage: True to end the stream with the token usage.
        continuous_usage_stats: True, beside `include_usage`, for the usage of its choice in every chunk.
        include_obfuscation: ignored: chunks have no padding.
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(RequestPart):
    """A JSON schema of the output, in OpenAI's format."""

    name: str | None = None
    description: str | None = None
    schema_: Schema | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(RequestPart):
    """Format of the output: ``text``, ``json_object``, ``json_schema`` or ``structural_tag``.

    Attributes:
        schema: llama.cpp's place of a JSON schema, for ``json_object`` and ``json_schema``.
    """

    type: str
    schema_: Schema | None = Field(default=None, alias="schema")
    json_schema: JsonSchema | None = None
    triggers: list[str] | None = None
    structures: list[Schema] | None = None
    format: Schema | None = None


class StructuredOutputs(RequestPart):
    """A constraint on the output; `StructuredOutputsParams` documents the fields."""

    DOCUMENTED_BY: ClassVar[tuple[type[Any], ...]] = (StructuredOutputsParams,)

    json_: str | Schema | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[_Text] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Schema | None = None
    whitespace_pattern: str | None = None


class SamplingRequest(RequestBody):
    """Base of requests that generate tokens; `SamplingParams` documents the fields.

    Attributes:
        prompt_logprobs: number of best tokens whose log-probabilities are returned for each token of the
            prompt, besides its own; not for streams.
        return_token_ids: True to return the token ids of the prompt and of the output.
        return_tokens_as_token_ids: True to write tokens of log-probabilities as ``token_id:42``.
        truncate_prompt_tokens: most tokens of the prompt, of which the last are kept; -1: as many as fit
            before `max_tokens`.
        use_beam_search: True to return the `n` most probable outputs, found by [beam search](#beam-search).
        length_penalty: of a beam search: scores are log-probabilities divided by the length, prompt included,
            to this power.
    """

    DOCUMENTED_BY: ClassVar[tuple[type[Any], ...]] = (SamplingParams,)

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: _Text | _Texts | None = None
    stop_token_ids: list[TokenId] | None = None
    bad_words: _Texts | None = None
    allowed_token_ids: list[TokenId] | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    thinking_token_budget: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    use_beam_search: bool = False
    length_penalty: Annotated[float, Field(ge=-100, le=100)] = 1.0
    vllm_xargs: dict[str, Any] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _check_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            message = "stream_options are for streams only; leave them out, or set stream to true"
            raise ApiError(400, message, "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            message = "prompt_logprobs are not for streams; leave them out, or set stream to false"
            raise ApiError(400, message, "prompt_logprobs")
        return self

    @property
    def wants_usage(self) -> bool:
        """True if a stream ends with the token usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_usage_always(self) -> bool:
        """True if every chunk of a stream has the token usage so far."""
        return self.wants_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def explicit_settings(self) -> dict[str, Any]:
        """Returns the fields of `SamplingParams` that are set; `vllm_xargs` are its `extra_args`."""
        settings = {name: value for name in _SHARED_FIELDS if (value := getattr(self, name)) is not None}
        return settings if self.vllm_xargs is None else {**settings, "extra_args": self.vllm_xargs}


_SHARED_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "bad_words",
    "allowed_token_ids",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "prompt_logprobs",
    "thinking_token_budget",
)
