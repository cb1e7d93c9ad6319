"""Prompts of texts and of messages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch_armllm.engine.text.chat_template import render_chat
from torch_armllm.server.errors import ApiError, bad_request
from torch_armllm.server.protocol.chat import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")


class Conversation(Protocol):
    """What a client says of a conversation."""

    messages: Any
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: dict[str, Any] | None


class Conversations:
    """What the tokenizer and its chat template make of requests, in a thread of its own.

    Args:
        tokenizer: of the model.
        chat_template: instead of its own.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> None:
        self.tokenizer = tokenizer
        self.template = str(chat_template or tokenizer.chat_template or "")
        self._given = {} if chat_template is None else {"chat_template": chat_template}
        self._thread = ThreadPoolExecutor(1, "armllm-tokenizer")

    async def of_messages(self, body: Conversation, tools: Sequence[Any] | None = None) -> dict[str, Any]:
        """The prompt that a conversation becomes.

        Args:
            body: what the client says.
            tools: described to the model.

        Raises:
            ApiError: there is no template, or it refuses the conversation.
        """
        knows_developer = "developer" in self.template
        messages = [_message(message, knows_developer) for message in body.messages]
        options: dict[str, Any] = {
            **(body.chat_template_kwargs or {}),
            **self._given,
            "add_generation_prompt": body.add_generation_prompt and not body.continue_final_message,
            "continue_final_message": body.continue_final_message,
        }
        if tools:
            options["tools"] = [tool.model_dump(exclude_none=True) for tool in tools]
        if {"tokenize", "chat_template", "conversation", "tokenizer"} & set(body.chat_template_kwargs or {}):
            raise ApiError(400, "chat_template_kwargs are variables of the template", "chat_template_kwargs")
        return await self._run(lambda: render_chat(self.tokenizer, messages, **options), "messages")

    async def of_text(self, text: str, add_special_tokens: bool = True) -> dict[str, Any]:
        """The prompt that a text becomes."""

        def tokens() -> dict[str, Any]:
            found = self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
            return {"prompt": text, "prompt_token_ids": list(found)}

        return await self._run(tokens, "prompt")

    async def text_of(self, tokens: list[int]) -> str:
        """The text of tokens, special ones included."""
        most = max(self.tokenizer.get_vocab().values())
        if max(tokens, default=0) > most:
            raise ApiError(400, f"the tokenizer's ids end at {most}", "tokens")
        return await self._run(lambda: str(self.tokenizer.decode(tokens)), "tokens")

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[], T], param: str) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except (ValueError, TypeError, UnicodeError) as error:
            raise bad_request(error, param) from error


def _message(message: Message, knows_developer: bool) -> dict[str, Any]:
    """A message as templates expect it."""
    made: dict[str, Any] = {"role": message.role, "content": _text(message)}
    if message.role == "developer" and not knows_developer:
        made["role"] = "system"
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            made[name] = value
    if message.tool_calls:
        made["tool_calls"] = [
            {
                **call.model_dump(exclude_none=True),
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return made


def _text(message: Message) -> str:
    if isinstance(message.content, list):
        other = next((part.type for part in message.content if part.type != "text"), None)
        if other is not None:
            raise ApiError(400, f"this model reads texts alone, no {other[:50]}", "messages")
        return "\n".join(part.text or "" for part in message.content)
    return message.content or ""


def _arguments(text: str) -> Any:
    """Arguments of an earlier call: templates want the object, clients have its JSON."""
    try:
        return json.loads(text or "{}")
    except ValueError as error:
        raise ApiError(400, f"a call's arguments are no JSON: {error}", "messages") from error
