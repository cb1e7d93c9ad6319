"""Output items of a response, and the events that tell of them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from torch_armllm.chat_format.deltas import OutputDelta, ToolCallDelta
from torch_armllm.server.custom_tools import custom_input
from torch_armllm.server.handlers.streaming import Event
from torch_armllm.server.responses_tools import ClientTool

_EVENTS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}


class ResponseItems:
    """Builds the items of one response, one after the other.

    Args:
        tools: the client's tools by the names that the model knows; calls of custom tools are whole before
            their text is told.

    Attributes:
        output: all items so far.
    """

    def __init__(self, tools: Mapping[str, ClientTool]) -> None:
        self._tools = tools
        self._arguments = ""  # of the call of a custom tool
        self.output: list[dict[str, Any]] = []
        self._open = False

    def add(self, delta: OutputDelta) -> Iterator[Event]:
        """Adds what was generated; yields the events of it, without sequence numbers."""
        if delta.reasoning:
            yield from self._add_text("reasoning", delta.reasoning)
        if delta.content:
            yield from self._add_text("message", delta.content)
        for call in delta.calls:
            yield from self._add_call(call)

    def finish(self, status: str) -> Iterator[Event]:
        """Ends the last item; an empty output becomes an empty message.

        Args:
            status: of the last item: ``completed`` or ``incomplete``.
        """
        if not self.output:
            yield from self._begin("message")
        yield from self._end(status)

    def _add_text(self, kind: str, text: str) -> Iterator[Event]:
        if not self._open or self.output[-1]["type"] != kind:
            yield from self._begin(kind)
        self.output[-1]["content"][0]["text"] += text
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        yield self._event(f"{_EVENTS[kind]}.delta", content_index=0, delta=text, **more)

    def _add_call(self, call: ToolCallDelta) -> Iterator[Event]:
        if call.name is not None:
            tool = self._tools.get(call.name)
            named = {"name": call.name} if tool is None else tool.named()
            if tool is not None and tool.is_custom:
                yield from self._begin("custom_tool_call", **named, call_id=call.id, input="")
                self._arguments = ""
            else:
                yield from self._begin("function_call", **named, call_id=call.id, arguments="")
        if self.output[-1]["type"] == "custom_tool_call":
            self._arguments += call.arguments
            return
        self.output[-1]["arguments"] += call.arguments
        yield self._event("response.function_call_arguments.delta", delta=call.arguments)

    def _begin(self, kind: str, **fields: Any) -> Iterator[Event]:
        yield from self._end("completed")
        item = {
            "id": f"{_PREFIXES[kind]}_{uuid.uuid4().hex}",
            "type": kind,
            "status": "in_progress",
            **fields,
        }
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        self.output.append(item)
        self._open = True
        yield {
            "type": "response.output_item.added",
            "output_index": len(self.output) - 1,
            "item": _copy(item),
        }
        if kind in ("message", "reasoning"):
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            if kind == "message":
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item["content"].append(part)
            yield self._event("response.content_part.added", content_index=0, part=dict(part))

    def _end(self, status: str) -> Iterator[Event]:
        if not self._open:
            return
        self._open = False
        item = self.output[-1]
        item["status"] = status
        done = f"{_EVENTS[item['type']]}.done"
        if item["type"] == "function_call":
            yield self._event(done, name=item["name"], arguments=item["arguments"])
        elif item["type"] == "custom_tool_call":
            item["input"] = custom_input(self._arguments)
            yield self._event("response.custom_tool_call_input.delta", delta=item["input"])
            yield self._event(done, input=item["input"])
        else:
            (part,) = item["content"]
            more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
            yield self._event(done, content_index=0, text=part["text"], **more)
            yield self._event("response.content_part.done", content_index=0, part=dict(part))
        yield {"type": "response.output_item.done", "output_index": len(self.output) - 1, "item": _copy(item)}

    def _event(self, kind: str, **fields: Any) -> Event:
        place = {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}
        return {"type": kind, **place, **fields}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of an item, which grows after its event was made."""
    if "content" in item:
        return {**item, "content": [dict(part) for part in item["content"]]}
    return dict(item)
