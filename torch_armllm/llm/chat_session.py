"""A chat session: a conversation with a model, turn by turn."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from torch_armllm.chat_format.deltas import OutputDelta
from torch_armllm.engine.media.media import open_media
from torch_armllm.engine.sampling_params import RequestOutputKind, SamplingParams
from torch_armllm.llm.calls.chat_call import ChatCall, ChatOptions
from torch_armllm.llm.llm import LLM


@dataclass
class TurnStats:
    """Statistics of one turn.

    Attributes:
        prompt_tokens: tokens of the conversation up to the user's message.
        cached_tokens: those of them that the prefix cache held.
        tokens: tokens of the reply.
        first: seconds from the message to the first piece of the reply; None: no reply.
        spent: seconds from there to the end of the reply.
        reason: `CompletionOutput.finish_reason`.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    first: float | None = None
    spent: float = 0.0
    reason: str | None = None

    def __str__(self) -> str:
        speed = f", {(self.tokens - 1) / self.spent:.1f} tok/s" if self.tokens > 1 and self.spent > 0 else ""
        first = f", the first after {self.first:.2f} s" if self.first is not None else ""
        end = {"length": "; cut off at the token limit", "abort": "; stopped"}.get(self.reason or "", "")
        return (
            f"{self.tokens} tokens{speed}{first}; prompt {self.prompt_tokens} tokens, "
            f"{self.cached_tokens} of them cached{end}"
        )


class ChatSession:
    """A conversation and its messages; the prefix cache holds their keys and values.

    Args:
        llm: the model.
        params: sampling parameters of the replies.
        system: system message, if any.

    Attributes:
        messages: all messages, with ``role`` and ``content``, and ``reasoning`` where a reply has any.
        last_turn: statistics of the last turn.
    """

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None) -> None:
        self._llm = llm
        self._call = ChatCall(llm.get_tokenizer(), ChatOptions(reasoning_parser=llm.reasoning_parser))
        self._params = replace(params, output_kind=RequestOutputKind.DELTA)
        self._system = system
        self.messages: list[dict[str, Any]] = []
        self.last_turn = TurnStats()
        self.clear()

    def clear(self) -> None:
        """Drops all messages but the system message."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def check(self, part: Mapping[str, Any]) -> None:
        """Reads the header of a part that is to go with a message.

        Raises:
            ValueError: it cannot be read, or the model takes no such parts.
            ImportError: the package that reads it is not installed.
        """
        message = {"role": "user", "content": [part]}
        open_media([message], self._llm.media_access, self._llm.picture_reader().taken)

    def ask(self, text: str, media: Sequence[Mapping[str, Any]] = ()) -> Generator[OutputDelta, None, None]:
        """Sends a user message and yields the reply in pieces; the pieces that were read are remembered.

        Reasoning and content are told apart by the format that the chat template writes.

        Args:
            text: of the message.
            media: parts before the text, such as images; see `LLM.chat`.

        Raises:
            ValueError: the conversation is too long, the template rejects it, or the model does not take the
                parts; the message is dropped.
        """
        start = time.perf_counter()
        self.last_turn = turn = TurnStats(reason="abort")
        words = [{"type": "text", "text": text}] if text else []
        messages = [*self.messages, {"role": "user", "content": [*media, *words] if media else text}]
        prompt: Any = self._llm.chat_prompt(self._call, messages)
        parser = self._call.parser(prompt["prompt"], messages)
        reply = OutputDelta()
        try:
            with closing(self._llm.stream(prompt, self._call.params(self._params))) as outputs:
                for output in outputs:
                    turn.prompt_tokens = len(output.prompt_token_ids)
                    turn.cached_tokens = output.num_cached_tokens
                    for completion in output.outputs:
                        turn.tokens += len(completion.token_ids)
                        turn.reason = completion.finish_reason or "abort"
                        if turn.first is None:
                            turn.first = time.perf_counter() - start
                        turn.spent = time.perf_counter() - start - turn.first
                        piece = parser.feed(completion.text)
                        if completion.finished:
                            piece = piece.joined(parser.finish(completion.finish_reason))
                        reply = reply.joined(piece)
                        yield piece
        finally:
            if turn.first is not None:
                thought = {"reasoning": reply.reasoning} if reply.reasoning else {}
                self.messages = [*messages, {"role": "assistant", "content": reply.content, **thought}]
