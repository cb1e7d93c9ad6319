"""Conversion of requests of `/v1/messages` to chat requests."""

from __future__ import annotations

import json
from typing import Any

from torch_armllm.server.chat_parts import chosen_tool, function_tool, image_part, text_part, tool_call
from torch_armllm.server.errors import ApiError
from torch_armllm.server.middleware.warnings import note_warnings
from torch_armllm.server.protocol.chat import ChatRequest, Message, Tool, effort_variables
from torch_armllm.server.protocol.messages import Block, CountTokensRequest, MessagesRequest, MessageTurn
from torch_armllm.server.protocol.sampling import ResponseFormat

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THOUGHTS = ("thinking", "redacted_thinking")
_BILLING = "x-anthropic-billing-header:"
"""Begins a block of Claude Code's system message that is another one in each request."""


def chat_request(body: CountTokensRequest, keeps_budget: bool = False) -> ChatRequest:
    """Returns the chat request that generates a message, or counts its prompt.

    A last message of the assistant is continued.

    Args:
        body: the request.
        keeps_budget: True if the engine can limit the reasoning.

    Raises:
        ApiError: the request needs what this server lacks: blocks other than texts, images and tools.
    """
    choice = body.tool_choice
    continues = body.messages[-1].role == "assistant"
    sampling: dict[str, Any] = {}
    if isinstance(body, MessagesRequest):
        sampling = {name: getattr(body, name) for name in ("temperature", "top_p", "top_k", "stream")}
        sampling |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences or None}
        if keeps_budget and body.thinking is not None and body.thinking.type == "enabled":
            sampling["thinking_token_budget"] = body.thinking.budget_tokens
    return ChatRequest(
        model=body.model,
        messages=_messages(body),
        tools=_tools(body),
        tool_choice=_choice(body),
        parallel_tool_calls=False if choice and choice.disable_parallel_tool_use else None,
        continue_final_message=continues,
        add_generation_prompt=not continues,
        response_format=_format(body),
        chat_template_kwargs=effort_variables("none" if thinks_not(body) else _effort(body)),
        **sampling,
    )


def thinks_not(body: CountTokensRequest) -> bool:
    """True if a request turns reasoning off."""
    return body.thinking is not None and body.thinking.type == "disabled"


def _effort(body: CountTokensRequest) -> str | None:
    return body.output_config.effort if body.output_config is not None else None


def _format(body: CountTokensRequest) -> ResponseFormat | None:
    newer = body.output_config.format if body.output_config is not None else None
    if newer is not None and body.output_format is not None:
        raise ApiError(400, "give output_config.format or output_format, not both", "output_format")
    form, param = (
        (newer, "output_config.format") if newer is not None else (body.output_format, "output_format")
    )
    if form is None:
        return None
    if form.type != "json_schema" or form.schema_ is None:
        message = f'a format is {{"type": "json_schema", "schema": {{…}}}}; this one is {form.type[:50]!r}'
        raise ApiError(400, message, param)
    return ResponseFormat(type=form.type, schema=form.schema_)


def _messages(body: CountTokensRequest) -> list[Message]:
    messages = []
    if system := _instructions(body.system):
        messages.append(Message(role="system", content=system))
    for index, turn in enumerate(body.messages):
        param = f"messages.{index}.content"
        if isinstance(turn.content, str):
            messages.append(Message(role=turn.role, content=turn.content))
        elif turn.role == "assistant":
            messages.append(_said(turn, param))
        elif turn.role == "system":
            messages.append(Message(role="system", content=_text(turn.content, param)))
        else:
            messages += _asked(turn.content, param)
    return messages


def _instructions(system: str | list[Block] | None) -> str:
    """Returns the system message, without what would keep every prompt out of the prefix cache."""
    if isinstance(system, list):
        kept = [block for block in system if not (block.text or "").startswith(_BILLING)]
        if len(kept) < len(system):
            note_warnings([f"the block {_BILLING} of the system message is left out"])
        system = kept
    return _text(system or "", "system")


def _said(turn: MessageTurn, param: str) -> Message:
    """Returns a message of the assistant."""
    assert isinstance(turn.content, list)
    texts, thoughts, calls = [], [], []
    for block in turn.content:
        if block.type == "text":
            texts.append(block.text or "")
        elif block.type in _THOUGHTS:
            thoughts.append(block.thinking or "")
        elif block.type == "tool_use":
            if block.name is None or block.id is None:
                raise ApiError(400, "a tool_use needs id, name and input", param)
            arguments = json.dumps(block.input or {}, ensure_ascii=False)
            calls.append(tool_call(block.name, arguments, block.id))
        else:
            raise _unsupported(block, "text, thinking and tool_use", param)
    return Message(
        role="assistant",
        content="".join(texts),
        reasoning_content="".join(thoughts) or None,
        tool_calls=calls or None,
    )


def _asked(blocks: list[Block], param: str) -> list[Message]:
    """Returns the results of tools, and then the message of the user, which gets their images."""
    results, parts = [], []
    for block in blocks:
        if block.type == "tool_result":
            if block.tool_use_id is None:
                raise ApiError(400, "a tool_result needs tool_use_id", param)
            inner = block.content or ""
            texts: str | list[Block] = inner
            if isinstance(inner, list):
                texts = [each for each in inner if each.type != "image"]
                parts += [image_part(_image(each, param)) for each in inner if each.type == "image"]
            text = _text(texts, param)
            results.append(Message(role="tool", content=text, tool_call_id=block.tool_use_id))
        elif block.type == "text":
            parts.append(text_part(block.text or ""))
        elif block.type == "image":
            parts.append(image_part(_image(block, param)))
        else:
            raise _unsupported(block, "text, image and tool_result", param)
    return [*results, Message(role="user", content=parts)] if parts else results


def _image(block: Block, param: str) -> str:
    source = block.source
    if source is not None and source.type == "url" and source.url is not None:
        return source.url
    if source is not None and source.type == "base64" and source.data is not None and source.media_type:
        return f"data:{source.media_type};base64,{source.data}"
    message = (
        'an image needs source: {"type": "base64", "media_type": …, "data": …} or {"type": "url", "url": …}'
    )
    raise ApiError(400, message, param)


def _text(content: str | list[Block], param: str) -> str:
    if isinstance(content, str):
        return content
    for block in content:
        if block.type != "text":
            raise _unsupported(block, "text", param)
    return "\n".join(block.text or "" for block in content)


def _unsupported(block: Block, known: str, param: str) -> ApiError:
    return ApiError(400, f"blocks of type {block.type[:50]!r} are not supported here; send {known}", param)


def _tools(body: CountTokensRequest) -> list[Tool] | None:
    for index, tool in enumerate(body.tools or ()):
        if tool.type not in (None, "custom"):
            message = f"tools of type {tool.type[:50]!r} are not supported; give your own, of type custom"
            raise ApiError(400, message, f"tools.{index}.type")
    return [
        function_tool(tool.name, tool.description, tool.input_schema, tool.strict)
        for tool in body.tools or ()
    ] or None


def _choice(body: CountTokensRequest) -> Any:
    choice = body.tool_choice
    if choice is None:
        return None
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name is None:
        raise ApiError(
            400, 'tool_choice of type tool needs a name: {"type": "tool", "name": …}', "tool_choice"
        )
    return chosen_tool(choice.name)
