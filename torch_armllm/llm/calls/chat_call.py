"""A call of `LLM.chat`: prompts of conversations, and messages of their outputs."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch_armllm.chat_format.aliases import TOOL_PARSERS
from torch_armllm.chat_format.chat_renderer import ChatInput, ChatRenderer
from torch_armllm.chat_format.deltas import OutputParser
from torch_armllm.chat_format.model_format import model_format
from torch_armllm.chat_format.prompt_part import begins_in
from torch_armllm.chat_format.rendering import make_parser, marks_with
from torch_armllm.engine.images.chat import render_media
from torch_armllm.engine.images.reader import PictureReader
from torch_armllm.engine.media.media import with_media
from torch_armllm.engine.media.media_access import MediaAccess
from torch_armllm.engine.outputs import ChatMessage, CompletionOutput, ToolCall
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.text.chat_template import NOT_VARIABLES, tokenized_chat
from torch_armllm.engine.text.content_format import CONTENT_FORMATS, ContentFormat
from torch_armllm.engine.text.preprocess import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChatOptions:
    """Options of a call, of its prompts and outputs; see `LLM.chat`.

    Attributes:
        template: instead of the tokenizer's own.
        content_format: form of the contents that the template reads.
        begins: True to begin a message of the assistant.
        continues: True to continue the last message.
        tools: that the template describes to the model.
        variables: of the template.
        tool_parser: format of the calls; None: the template's.
        reasoning_parser: format of the reasoning; None: the template's.
    """

    template: str | None = None
    content_format: ContentFormat = "auto"
    begins: bool = True
    continues: bool = False
    tools: Sequence[Any] | None = None
    variables: Mapping[str, Any] | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None


class ChatCall:
    """One call of `LLM.chat`.

    Args:
        tokenizer: the model's.
        options: of the call.

    Raises:
        ValueError: there is no tokenizer; options are wrong or contradict each other; or there are tools, and
            the model's calls are not understood.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, options: ChatOptions) -> None:
        if tokenizer is None:
            raise ValueError("there is no tokenizer: give one, or use generate with prompt_token_ids")
        _check(options)
        self._tokenizer, self._options = tokenizer, options
        self._tools = [_tool(tool, index) for index, tool in enumerate(options.tools or ())]
        self._schemas = {each["function"]["name"]: each["function"].get("parameters") for each in self._tools}
        self._renderer = ChatRenderer(tokenizer, options.template, options.content_format)
        template = str(options.template or tokenizer.chat_template or "")
        self._format = model_format(tokenizer, template, options.tool_parser, options.reasoning_parser)
        refusal = self._format.refusal("give tool_call_parser:")
        if self._tools and refusal is not None:
            raise ValueError(refusal)

    def prompt(self, messages: Sequence[Message]) -> dict[str, Any]:
        """Returns the prompt of a conversation without images, sound and videos.

        Raises:
            ValueError: a message has a wrong form, or the template rejects the conversation.
        """
        text, warnings = self._renderer.render(self._input(messages))
        _tell(warnings)
        return tokenized_chat(self._tokenizer, text)

    def media_prompt(self, messages: Sequence[Message], reader: PictureReader, access: MediaAccess) -> Prompt:
        """Returns the prompt of a conversation with images, sound or videos.

        Args:
            messages: the conversation.
            reader: of the model's media.
            access: what their URLs may name.

        Raises:
            ValueError: see `prompt`; or something cannot be read, or the model does not take it.
        """
        fitted = self._renderer.fitted(self._input(messages), keep_contents=True)
        _tell(fitted.warnings)
        given: dict[str, Any] = {
            **fitted.variables,
            "content_format": self._options.content_format,
            "add_generation_prompt": self._options.begins,
            "continue_final_message": self._options.continues,
        }
        if self._options.template is not None:
            given["chat_template"] = self._options.template
        shown, media = with_media(fitted.messages, access, reader.taken)
        return render_media(reader, self._tokenizer, shown, media, **given)

    def params(self, given: SamplingParams) -> SamplingParams:
        """Returns sampling parameters that keep the special tokens which the parser reads."""
        special = getattr(self._tokenizer, "all_special_tokens", ())
        if self._tools or marks_with(self._format.format, special):
            return replace(given, skip_special_tokens=False)
        return given

    def message(self, completion: CompletionOutput, prompt: str, messages: Sequence[Message]) -> ChatMessage:
        """Returns an output as a message.

        Args:
            completion: the output, which is finished.
            prompt: the text of its prompt.
            messages: the conversation.
        """
        parser = self.parser(prompt, messages)
        parsed = parser.feed(completion.text).joined(parser.finish(completion.finish_reason))
        calls = [ToolCall(call.id or "", call.name or "", call.arguments) for call in parsed.calls]
        return ChatMessage(parsed.content, parsed.reasoning, calls)

    def parser(self, prompt: str, messages: Sequence[Message]) -> OutputParser:
        """Returns the parser of an output.

        Args:
            prompt: the text of the output's prompt.
            messages: the conversation.
        """
        format, keeps = self._format.format, self._format.keeps_reasoning
        begun = None
        if self._options.continues:
            last = _given(messages[-1])
            begun = _text(last["content"])
            if not begun and last.get("reasoning") and format.reasoning is not None and not keeps:
                begun = format.reasoning.begin  # a message without content goes on within its reasoning
        return make_parser(
            format,
            self._schemas,
            begins_in=begins_in(format, prompt, begun),
            continued=self._options.continues,
            reasoning_is_content=keeps,
        )

    def _input(self, messages: Sequence[Message]) -> ChatInput:
        options = self._options
        given = [_given(message) for message in messages]
        if not given:
            raise ValueError("the conversation is empty: give at least one message")
        return ChatInput(given, self._tools, options.variables or {}, options.begins, options.continues)


def _check(options: ChatOptions) -> None:
    if options.continues and options.begins:
        raise ValueError(
            "continue_final_message and add_generation_prompt exclude each other: the one continues the last "
            "message, the other begins a reply"
        )
    if options.content_format not in CONTENT_FORMATS:
        known = ", ".join(CONTENT_FORMATS[:-1])
        raise ValueError(
            f"chat_template_content_format is {options.content_format!r}; give {known} or "
            f"{CONTENT_FORMATS[-1]}"
        )
    if refused := sorted(NOT_VARIABLES & set(options.variables or ())):
        raise ValueError(
            f"chat_template_kwargs sets {', '.join(refused)}; give variables of the template only"
        )
    if options.tool_parser is not None and options.tool_parser not in TOOL_PARSERS:
        raise ValueError(f"tool_call_parser is {options.tool_parser!r}; give {', '.join(TOOL_PARSERS)}")


def _tool(tool: Any, index: int) -> dict[str, Any]:
    """Returns a tool in OpenAI's form; one that is a Python function is described by its docstring."""
    if callable(tool):
        from transformers.utils import get_json_schema

        return dict(get_json_schema(tool))
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(
            f"tools[{index}] is no tool: give "
            '{"type": "function", "function": {"name": …, "description": …, "parameters": …}}'
        )
    return dict(tool)


def _given(message: Message) -> dict[str, Any]:
    """Returns a message in the form that `ChatRenderer` takes: reasoning by one name, arguments as JSON."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError('a message is no {"role": …, "content": …}')
    given = {name: value for name, value in message.items() if value is not None}
    given["content"] = _parts(message.get("content"))
    thoughts = [given.pop(name, None) for name in ("reasoning_content", "reasoning")]
    if (reasoning := thoughts[0] or thoughts[1]) and given["role"] == "assistant":
        given["reasoning"] = reasoning
    if calls := given.pop("tool_calls", None):
        given["tool_calls"] = [_call(call) for call in calls]
    return given


def _parts(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError('a tool call is no {"id": …, "function": {"name": …, "arguments": …}}')
    arguments = function.get("arguments") or ""
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _text(content: Any) -> str:
    if not isinstance(content, list):
        return content or ""
    return "\n".join(part.get("text") or "" for part in content if part.get("type") == "text")


def _tell(warnings: Sequence[str]) -> None:
    for warning in warnings:
        _LOGGER.warning("%s", warning)
