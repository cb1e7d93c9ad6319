"""Request schema of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator
from typing_extensions import Self

from torch_armllm.server.custom_tools import custom_arguments, custom_function
from torch_armllm.server.errors import ApiError
from torch_armllm.server.middleware.warnings import note_warnings
from torch_armllm.server.protocol.body import RequestPart, Schema
from torch_armllm.server.protocol.sampling import SamplingRequest


class MediaUrl(RequestPart):
    """The URL of an image or of sound; `detail` is accepted and has no effect."""

    url: str
    detail: str | None = None


class InputAudio(RequestPart):
    """A file of sound in base64, and the name of its format."""

    data: str
    format: str


class VideoUrl(RequestPart):
    """The URL of a video file, or those of images; `detail` is accepted and has no effect.

    `fps` and `num_frames` say which frames of a file are taken; `fps` of images is their rate.
    """

    url: str | list[str]
    fps: float | None = None
    num_frames: int | None = None
    detail: str | None = None


class ContentPart(RequestPart):
    """A part of a message: a text, the text of a refusal, an image by its URL, sound, or a video."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: MediaUrl | None = None
    input_audio: InputAudio | None = None
    audio_url: MediaUrl | None = None
    video_url: VideoUrl | None = None


_MEDIA = {
    "image_url": '{"url": …}',
    "input_audio": '{"data": "…base64…", "format": "wav"}',
    "audio_url": '{"url": …}',
    "video_url": '{"url": …}',
}
"""Types of parts that hold media in a field of that name, and its form."""


class CalledFunction(RequestPart):
    """A called function, with its arguments as JSON."""

    name: str
    arguments: str = ""


class CalledCustom(RequestPart):
    """A called custom tool, with the text that it got."""

    name: str
    input: str = ""


class ToolCall(RequestPart):
    """A tool call of an earlier assistant message; `index` comes back with a stream's deltas.

    That of a custom tool is the call of the function that stands for it.
    """

    id: str | None = None
    index: int | None = None
    type: str = "function"
    function: CalledFunction
    custom: CalledCustom | None = Field(default=None, exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _of_custom(cls, given: Any) -> Any:
        if (custom := _custom_of(given)) is None:
            return given
        called = CalledCustom.model_validate(custom)
        function = {"name": called.name, "arguments": custom_arguments(called.input)}
        return {**given, "type": "function", "function": function}


class Message(RequestPart):
    """A message of a conversation; `reasoning` is another name of `reasoning_content`.

    `refusal` of an earlier answer is its content where it has none; `annotations` come back with it.
    """

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: Any = None

    @model_validator(mode="after")
    def _read_refusals(self) -> Self:
        """Takes refusals for the texts that they are."""
        if self.refusal and not self.content:
            self.content = self.refusal
        for part in self.content if isinstance(self.content, list) else ():
            if part.type == "refusal":
                part.type, part.text, part.refusal = "text", part.refusal or part.text, None
        return self

    @property
    def has_media(self) -> bool:
        """True if a part of the content is an image, sound or a video."""
        return isinstance(self.content, list) and any(part.type in _MEDIA for part in self.content)

    def parts(self) -> list[dict[str, Any]]:
        """Returns the parts of a content that is a list.

        Raises:
            ApiError: a part is neither a text nor media, or the message with media is not the user's.
        """
        assert isinstance(self.content, list)
        if self.role != "user" and self.has_media:
            text = f"a message of role {self.role!r} cannot hold images, sound or videos"
            raise ApiError(400, text, "messages")
        for part in self.content:
            self._check(part)
            if (form := _MEDIA.get(part.type)) is not None and getattr(part, part.type) is None:
                message = f"a part of type {part.type!r} needs {part.type}: {form}"
                raise ApiError(400, message, "messages")
            if part.type == "text" and part.text is None:
                part.text = ""
        return [part.model_dump(exclude_none=True) for part in self.content]

    def text(self) -> str:
        """Returns the text of the content, without its media.

        Raises:
            ApiError: the content holds something else.
        """
        if not isinstance(self.content, list):
            return self.content or ""
        for part in self.content:
            self._check(part)
        return "\n".join(part.text or "" for part in self.content if part.type == "text")

    def _check(self, part: ContentPart) -> None:
        if part.type != "text" and part.type not in _MEDIA:
            known = ", ".join(("text", *_MEDIA))
            message = f"content type {part.type[:50]!r} is not supported; send {known}"
            raise ApiError(400, message, "messages")


class Function(RequestPart):
    """A function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class CustomTool(RequestPart):
    """A tool that takes a text; its `format` is told to the model, and not enforced."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    format: Any = None


class Tool(RequestPart):
    """A tool that the model may use: a function, also one that stands for a custom tool."""

    type: Literal["function", "custom"] = "function"
    function: Function
    custom: CustomTool | None = Field(default=None, exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _of_custom(cls, given: Any) -> Any:
        if (custom := _custom_of(given)) is None:
            return given
        tool = CustomTool.model_validate(custom)
        function = custom_function(tool.name, tool.description, tool.format)
        return {**given, "type": "function", "function": function}


class ChosenFunction(RequestPart):
    """A function by its name."""

    name: str


class ChosenTool(RequestPart):
    """The tool that the model must call, a function or a custom tool."""

    type: Literal["function", "custom"] = "function"
    function: ChosenFunction
    custom: ChosenFunction | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_custom(cls, given: Any) -> Any:
        custom = _custom_of(given)
        return given if custom is None else {**given, "type": "function", "function": custom}


class AllowedTools(RequestPart):
    """The tools of a request that the model may call now."""

    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[ChosenTool], Field(min_length=1)]


class AllowedChoice(RequestPart):
    """The choice of some of the tools; the model does not see the others."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class ChatRequest(SamplingRequest):
    """A chat completion request.

    Attributes:
        logprobs: True to return the log-probabilities of the output tokens.
        top_logprobs: number of most likely tokens to list at each position.
        parallel_tool_calls: False to end each output behind its first call.
        include_reasoning: False to leave reasoning out of the response; its tokens count nevertheless.
        reasoning_effort: variable of the chat template; ``none`` also turns reasoning off where the template
            can, by its variables `enable_thinking` and `thinking`.
        continue_final_message: True to continue the last message instead of starting a new one.
        chat_template_kwargs: further variables of the chat template.
        verbosity: variable of the chat template.
        metadata: ignored, as `prompt_cache_key`, `prompt_cache_retention`, `safety_identifier` and
            `service_tier` are: every prompt is cached.
        store: ignored: nothing is stored; True gets a warning.
    """

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | AllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool = True
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    verbosity: Annotated[str, Field(max_length=32)] | None = None
    store: bool | None = None
    metadata: Any = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None

    @model_validator(mode="after")
    def _check_generation_prompt(self) -> Self:
        check_generation_prompt(self)
        if self.store:
            note_warnings(["store is true, but this server stores nothing"])
        return self

    @model_validator(mode="after")
    def _leave_out_other_tools(self) -> Self:
        """Leaves the tools that `tool_choice` allows."""
        if isinstance(choice := self.tool_choice, AllowedChoice):
            names = [tool.function.name for tool in choice.allowed_tools.tools]
            self.tools = allowed_tools(self.tools or [], names, "tool_choice")
            self.tool_choice = choice.allowed_tools.mode
        return self

    def custom_names(self) -> frozenset[str]:
        """Returns the names of the custom tools."""
        return frozenset(tool.function.name for tool in self.tools or () if tool.custom is not None)

    def template_variables(self) -> dict[str, Any]:
        """Returns the variables of the chat template that the request sets."""
        told = {} if self.verbosity is None else {"verbosity": self.verbosity}
        return {**told, **effort_variables(self.reasoning_effort), **(self.chat_template_kwargs or {})}


def _custom_of(given: Any) -> Any:
    """Returns what a tool or a call of the type ``custom`` holds; None if it is of another type."""
    if not isinstance(given, dict) or given.get("type") != "custom":
        return None
    custom = given.get("custom")
    if not isinstance(custom, dict) or not isinstance(custom.get("name"), str):
        raise ValueError('a tool of type custom needs custom: {"name": …}')
    return custom


def allowed_tools(tools: list[Tool], names: Sequence[str], param: str) -> list[Tool]:
    """Returns the tools of some names.

    Args:
        tools: of a request.
        names: of those that are allowed.
        param: the request's field that names them.

    Raises:
        ApiError: a name is that of no tool.
    """
    known = {tool.function.name for tool in tools}
    if (unknown := next((name for name in names if name not in known), None)) is not None:
        raise ApiError(400, f"{param} allows {unknown[:200]!r}, which is not in tools", param)
    return [tool for tool in tools if tool.function.name in names]


def effort_variables(effort: str | None) -> dict[str, Any]:
    """Returns the variables of chat templates that stand for an effort of reasoning."""
    if effort is None:
        return {}
    off = {"enable_thinking": False, "thinking": False} if effort == "none" else {}
    return {"reasoning_effort": effort, **off}


def check_generation_prompt(body: BaseModel) -> None:
    """Checks that a request does not ask both to begin a message and to continue one.

    Raises:
        ApiError: it does.
    """
    asked = {name for name in ("add_generation_prompt", "continue_final_message") if getattr(body, name)}
    if len(asked & body.model_fields_set) == 2:
        message = (
            "add_generation_prompt and continue_final_message exclude each other: the one begins a message, "
            "the other continues the last; set one of them"
        )
        raise ApiError(400, message, "continue_final_message")
