"""How tokens are drawn, as clients say it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from torch_armllm.server.protocol.body import MOST_CHOICES, Body, Part, Schema, TokenId

_Text = Annotated[str, Field(min_length=1)]
_Texts = Annotated[list[_Text], Field(max_length=64)]


class StreamOptions(Part):
    """What a stream tells besides the answer."""

    include_usage: bool | None = None


class JsonSchema(Part):
    """A schema of answers, in OpenAI's wrapping."""

    name: str | None = None
    description: str | None = None
    schema_: Schema | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Part):
    """The form of answers: ``text``, ``json_object`` or ``json_schema``."""

    type: str
    json_schema: JsonSchema | None = None


class StructuredOutputs(Part):
    """What answers must match; see `StructuredOutputsParams`."""

    json_: str | Schema | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[_Text] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Sampling(Body):
    """Settings of a request that draws tokens; see `SamplingParams` for their meaning."""

    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
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
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with what was used."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def said(self) -> dict[str, Any]:
        """The settings that have a value, of those that `SamplingParams` has by the same name."""
        return {name: value for name in _SAME if (value := getattr(self, name)) is not None}


_SAME = (
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
)
