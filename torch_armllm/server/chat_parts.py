"""Parts of chat requests, made from those of other formats."""

from __future__ import annotations

from torch_armllm.server.protocol.body import Schema
from torch_armllm.server.protocol.chat import (
    CalledFunction,
    ChosenFunction,
    ChosenTool,
    ContentPart,
    Function,
    InputAudio,
    MediaUrl,
    Tool,
    ToolCall,
)


def text_part(text: str) -> ContentPart:
    """Returns a part that is a text."""
    return ContentPart(type="text", text=text)


def image_part(url: str, detail: str | None = None) -> ContentPart:
    """Returns a part that is an image."""
    return ContentPart(type="image_url", image_url=MediaUrl(url=url, detail=detail))


def audio_part(audio: InputAudio) -> ContentPart:
    """Returns a part that is sound."""
    return ContentPart(type="input_audio", input_audio=audio)


def tool_call(name: str, arguments: str, call_id: str) -> ToolCall:
    """Returns a call of an earlier message; its arguments are JSON."""
    return ToolCall(id=call_id, function=CalledFunction(name=name, arguments=arguments))


def function_tool(
    name: str, description: str | None, parameters: Schema | None, strict: bool | None = None
) -> Tool:
    """Returns a tool that the model may use."""
    function = Function(name=name, description=description, parameters=parameters, strict=strict)
    return Tool(function=function)


def chosen_tool(name: str) -> ChosenTool:
    """Returns the choice of one tool."""
    return ChosenTool(function=ChosenFunction(name=name))
