"""Request schemas of `/v1/messages`, in Anthropic's format."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from torch_armllm.server.protocol.body import RequestBody, RequestPart, Schema


class Source(RequestPart):
    """A picture: its bytes in base64, or its URL."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class Block(RequestPart):
    """A block of a message's content: a text, a picture, a tool's call or result, or thinking.

    `cache_control` has no effect, as all prompts are cached; `signature` and `data` come back with thinking.
    """

    type: str
    text: str | None = None
    source: Source | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: Any = None
    data: Any = None
    cache_control: Any = None


class MessageTurn(RequestPart):
    """A message of a conversation; one of the system holds at its place, after those before it."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(min_length=1)]


class MessagesTool(RequestPart):
    """A tool that the model may use; `type` is ``custom``, and `cache_control` has no effect."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    input_schema: Schema | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: Any = None


class MessagesToolChoice(RequestPart):
    """Use of the tools: ``auto``, ``any``, ``none``, or ``tool`` with the name of one."""

    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(RequestPart):
    """Settings of the reasoning; a model that does not reason has no use for `budget_tokens`."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None


class OutputFormat(RequestPart):
    """Format of the text: ``json_schema``, with its schema."""

    type: str
    schema_: Schema | None = Field(default=None, alias="schema")


class OutputConfig(RequestPart):
    """Settings of the output: `format` of its text, and `effort` of the reasoning, a template's variable."""

    format: OutputFormat | None = None
    effort: Annotated[str, Field(max_length=32)] | None = None


class CountTokensRequest(RequestBody):
    """A request for the number of tokens of a conversation.

    Attributes:
        system: system message, or blocks of text.
        thinking: ``disabled`` turns reasoning off where the chat template can; without it, the model reasons
            as the template decides, and the response leaves the reasoning out.
        output_config: `format`, a JSON schema that the text has to match, and `effort` of the reasoning.
        output_format: the older name of `output_config.format`.
    """

    messages: Annotated[list[MessageTurn], Field(min_length=1)]
    system: str | list[Block] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None


class MessagesRequest(CountTokensRequest):
    """A request for the next message of a conversation.

    Attributes:
        max_tokens: maximum number of tokens to generate.
        stop_sequences: texts that end the message.
        metadata: ignored, as `service_tier` is.
    """

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    stop_sequences: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=64)] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
