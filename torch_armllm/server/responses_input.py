"""Conversion of requests of `/v1/responses` to chat requests."""

from __future__ import annotations

from torch_armllm.server.chat_parts import audio_part, image_part, text_part, tool_call
from torch_armllm.server.custom_tools import custom_arguments
from torch_armllm.server.errors import ApiError
from torch_armllm.server.protocol.chat import ChatRequest, ContentPart, Message
from torch_armllm.server.protocol.responses import InputItem, InputPart, ResponsesRequest, TextConfig
from torch_armllm.server.protocol.sampling import JsonSchema, ResponseFormat
from torch_armllm.server.responses_tools import name_in, tools_and_choice

_SAME = (
    *("model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stream", "priority"),
    *("parallel_tool_calls", "include_reasoning", "chat_template_kwargs"),
)
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_MEDIA = ("input_image", "input_audio")
_GIVEN = {"function_call": "arguments", "custom_tool_call": "input"}


def chat_request(body: ResponsesRequest) -> ChatRequest:
    """Returns the chat request that generates a response.

    Raises:
        ApiError: the request needs what this server lacks: stored responses, tools that the server runs, or
            input other than texts, images and sound.
    """
    _check_stateless(body)
    tools, choice = tools_and_choice(body)
    return ChatRequest(
        messages=_messages(body),
        max_tokens=body.max_output_tokens,
        response_format=_format(body.text),
        tools=tools,
        tool_choice=choice,
        verbosity=body.text.verbosity if body.text else None,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        **{name: getattr(body, name) for name in _SAME},
    )


def _check_stateless(body: ResponsesRequest) -> None:
    stored = "responses are not stored on this server"
    remedy = {
        "store": f"store is true, but {stored}; leave it out",
        "previous_response_id": f"{stored}; send the earlier items in input instead",
        "conversation": f"{stored}, nor are conversations; send the earlier items in input instead",
        "prompt": "prompt templates are not stored on this server; send instructions and input instead",
        "background": f"background is true, but {stored}; leave it out, or set stream",
        "top_logprobs": "top_logprobs is not supported here; use /v1/chat/completions",
    }
    for name, message in remedy.items():
        if getattr(body, name):
            raise ApiError(400, message, name, "unsupported_parameter")
    if body.truncation not in (None, "disabled"):
        message = f"truncation is {body.truncation[:50]!r}; only disabled is supported"
        raise ApiError(400, message, "truncation", "unsupported_parameter")


def _messages(body: ResponsesRequest) -> list[Message]:
    items = [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    messages: list[Message] = []
    if body.instructions:
        messages.append(Message(role="system", content=body.instructions))
    reasoning: str | None = None
    for index, item in enumerate(items):
        param = f"input.{index}"
        if item.type == "reasoning":
            shown = _text(item.content, f"{param}.content") or _text(item.summary, f"{param}.summary")
            reasoning = shown or reasoning
        elif item.type == "message":
            if item.role is None:
                raise ApiError(400, "a message needs a role", f"{param}.role")
            content = _content(item.content, f"{param}.content")
            thought, reasoning = (reasoning, None) if item.role == "assistant" else (None, reasoning)
            messages.append(Message(role=item.role, content=content, reasoning_content=thought))
        elif item.type in ("function_call", "custom_tool_call"):
            if item.name is None or item.call_id is None:
                raise ApiError(400, f"a {item.type} needs name, call_id and {_GIVEN[item.type]}", param)
            if not messages or messages[-1].role != "assistant":
                messages.append(Message(role="assistant", reasoning_content=reasoning))
                reasoning = None
            custom = item.type == "custom_tool_call"
            arguments = custom_arguments(item.input or "") if custom else item.arguments
            call = tool_call(name_in(item.namespace, item.name), arguments, item.call_id)
            messages[-1].tool_calls = [*(messages[-1].tool_calls or []), call]
        elif item.type in ("function_call_output", "custom_tool_call_output"):
            if item.call_id is None or item.output is None:
                raise ApiError(400, f"a {item.type} needs call_id and output", param)
            text = _text(item.output, f"{param}.output")
            messages.append(Message(role="tool", content=text, tool_call_id=item.call_id))
        else:
            message = (
                f"input items of type {item.type[:50]!r} are not supported; send message, function_call, "
                "custom_tool_call, their outputs (function_call_output, custom_tool_call_output) or reasoning"
            )
            raise ApiError(400, message, f"{param}.type")
    if not messages:
        raise ApiError(400, "input holds no message; give at least one", "input")
    return messages


def _content(content: str | list[InputPart] | None, param: str) -> str | list[ContentPart]:
    if not isinstance(content, list) or not any(part.type in _MEDIA for part in content):
        return _text(content, param)
    parts = []
    for part in content:
        if part.type == "input_audio":
            if part.input_audio is None:
                message = 'an input_audio needs input_audio: {"data": "…base64…", "format": "wav"}'
                raise ApiError(400, message, param)
            parts.append(audio_part(part.input_audio))
        elif part.type != "input_image":
            parts.append(text_part(_text([part], param)))
        elif part.image_url is None:
            raise ApiError(400, "an input_image needs image_url: this server stores no files", param)
        else:
            parts.append(image_part(part.image_url, part.detail))
    return parts


def _text(content: str | list[InputPart] | None, param: str) -> str:
    if not isinstance(content, list):
        return content or ""
    other = next((p.type for p in content if p.type not in (*_TEXTS, "refusal")), None)
    if other is not None:
        raise ApiError(400, f"content type {other[:50]!r} is not supported here; send text", param)
    return "\n".join(part.text or part.refusal or "" for part in content)


def _format(text: TextConfig | None) -> ResponseFormat | None:
    if text is None or text.format is None:
        return None
    form = text.format
    if form.type not in ("text", "json_object", "json_schema"):
        message = f"text.format.type is {form.type[:50]!r}; give text, json_object or json_schema"
        raise ApiError(400, message, "text.format.type")
    if form.type != "json_schema":
        return ResponseFormat(type=form.type, schema=form.schema_)
    if form.schema_ is None:
        raise ApiError(400, "a format of type json_schema needs a schema", "text.format.schema")
    return ResponseFormat(type=form.type, json_schema=JsonSchema(name=form.name, schema=form.schema_))
