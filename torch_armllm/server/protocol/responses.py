"""Request schema of `/v1/responses`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from torch_armllm.server.protocol.body import RequestBody, RequestPart, Schema


class InputPart(RequestPart):
    """A part of an item's content: a text, or a picture by its URL.

    `detail` has no effect, nor have `annotations` and `logprobs`, which come back with an output.
    """

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: str | None = None
    annotations: Any = None
    logprobs: Any = None


class InputItem(RequestPart):
    """An item of the input: a message, a function call, its output, or reasoning.

    `id`, `status` and `summary` come back with an output, and have no effect.
    """

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str = ""
    output: str | list[InputPart] | None = None
    id: Any = None
    status: Any = None
    summary: Any = None


class ResponseTool(RequestPart):
    """A function that the model may call."""

    type: str
    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class NamedTool(RequestPart):
    """The function that the model must call."""

    type: str
    name: str | None = None


class TextFormat(RequestPart):
    """Format of the text: ``text``, ``json_object`` or ``json_schema``."""

    type: str
    name: str | None = None
    description: str | None = None
    schema_: Schema | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(RequestPart):
    """Settings of the text."""

    format: TextFormat | None = None


class ReasoningConfig(RequestPart):
    """Settings of the reasoning."""

    effort: Annotated[str, Field(max_length=32)] | None = None


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
    metadata: dict[str, str] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    stream: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    truncation: str | None = None
    top_logprobs: int | None = None
