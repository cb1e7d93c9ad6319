"""`/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from torch_armllm.server.protocol.body import Part, Schema
from torch_armllm.server.protocol.sampling import Sampling


class ContentPart(Part):
    """A part of a message; only texts are understood."""

    type: str
    text: str | None = None


class CalledFunction(Part):
    """A function that the model called, with its arguments as JSON."""

    name: str
    arguments: str = ""


class ToolCall(Part):
    """A call that an earlier answer made."""

    id: str | None = None
    type: str = "function"
    function: CalledFunction


class Message(Part):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class Function(Part):
    """A function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(Part):
    """A tool that the model may use."""

    type: Literal["function"] = "function"
    function: Function


class ChosenFunction(Part):
    """A function by its name."""

    name: str


class ChosenTool(Part):
    """The tool that the model has to use."""

    type: Literal["function"] = "function"
    function: ChosenFunction


class ChatRequest(Sampling):
    """A conversation that is to be continued.

    Attributes:
        logprobs: whether the tokens' log-probabilities are told.
        top_logprobs: and those of so many best ones at each place.
        continue_final_message: leaves the last message open.
        chat_template_kwargs: further variables of the template.
    """

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
