"""Request schema of `/v1/responses`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from torch_armllm.server.protocol.body import RequestBody, RequestPart, Schema
from torch_armllm.server.protocol.chat import InputAudio
from torch_armllm.server.protocol.sampling import StreamOptions


class InputPart(RequestPart):
    """A part of an item's content: a text, an image by its URL, or sound.

    `detail` has no effect, nor have `annotations` and `logprobs`, which come back with an output.
    """

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    input_audio: InputAudio | None = None
    detail: str | None = None
    annotations: Any = None
    logprobs: Any = None


class InputItem(RequestPart):
    """An item of the input: a message, a call of a function or a custom tool, its output, or reasoning.

    Reasoning without `content` is its `summary`. `id`, `status`, `phase` and `encrypted_content` come back
    with an output, and have no effect.
    """

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str = ""
    input: str | None = None
    output: str | list[InputPart] | None = None
    id: Any = None
    status: Any = None
    summary: list[InputPart] | None = None
    phase: Any = None
    encrypted_content: Any = None


class ResponseTool(RequestPart):
    """A function that the model may call, a custom tool, which takes a text, or a namespace of such tools.

    The `format` of a custom tool is told to the model, and not enforced. `defer_loading` has no effect: every
    tool is told to the model.
    """

    type: str
    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None
    format: Any = None
    tools: list[ResponseTool] | None = None
    defer_loading: Any = None


class NamedTool(RequestPart):
    """The tool that the model must call; or, with the type ``allowed_tools``, the ones that it may.

    Attributes:
        mode: ``auto`` or ``required``.
    """

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[NamedTool] | None = None


class TextFormat(RequestPart):
    """Format of the text: ``text``, ``json_object`` or ``json_schema``."""

    type: str
    name: str | None = None
    description: str | None = None
    schema_: Schema | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(RequestPart):
    """Settings of the text: its format; `verbosity` is a variable of the chat template."""

    format: TextFormat | None = None
    verbosity: Annotated[str, Field(max_length=32)] | None = None


class ReasoningConfig(RequestPart):
    """Settings of the reasoning; `summary` has no effect, as the reasoning itself is returned."""

    effort: Annotated[str, Field(max_length=32)] | None = None
    summary: Any = None
    generate_summary: Any = None


class ResponsesRequest(RequestBody):
    """A request for a response, which is not stored.

    Attributes:
        input: a user's text, or the items of a conversation.
        instructions: system message before the input.
        text: `format`, as `response_format` of the chat route.
        reasoning: `effort`, as `reasoning_effort` of the chat route.
        include_reasoning: False to leave reasoning out of the response; its tokens count nevertheless.
        chat_template_kwargs: further variables of the chat template.
        store: True is refused.
        previous_response_id: refused, as `conversation`, `prompt` and `background` are.
        truncation: ``disabled``.
        top_logprobs: 0.
        include: ignored, as `prompt_cache_key`, `prompt_cache_retention`, `safety_identifier` and
            `service_tier` are: every prompt is cached, and reasoning comes unencrypted.
        max_tool_calls: ignored: it limits tools that a server calls itself.
    """

    input: str | Annotated[list[InputItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    text: TextConfig | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    include_reasoning: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    stream: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    truncation: str | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    max_tool_calls: int | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    stream_options: StreamOptions | None = None
