"""A conversation with a model, turn by turn."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from torch_armllm.engine.sampling_params import RequestOutputKind, SamplingParams
from torch_armllm.engine.text.chat_template import render_chat
from torch_armllm.llm.llm import LLM


@dataclass
class TurnStats:
    """How an answer came.

    Attributes:
        prompt_tokens: of the conversation up to the question.
        cached_tokens: of those, that the prefix cache held.
        tokens: of the answer.
        first: seconds from the question to the first piece of the answer; None: there was none.
        spent: seconds from there to its end.
        reason: why it ended, as `CompletionOutput.finish_reason` says.
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
        end = {"length": "; cut off at its length", "abort": "; stopped"}.get(self.reason or "", "")
        return (
            f"{self.tokens} tokens{speed}{first}; prompt {self.prompt_tokens} tokens, "
            f"{self.cached_tokens} of them cached{end}"
        )


class ChatSession:
    """Keeps the messages; the prefix cache keeps what the model has read of them.

    Args:
        llm: who answers.
        params: how.
        system: the first message, if any.
        template: variables of the chat template.

    Attributes:
        messages: all of them, with ``role`` and ``content``.
        last_turn: how the last answer came.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        system: str | None = None,
        template: dict[str, Any] | None = None,
    ) -> None:
        self._llm = llm
        self._params = replace(params, output_kind=RequestOutputKind.DELTA)
        self._system = system
        self._template = template or {}
        self.messages: list[dict[str, Any]] = []
        self.last_turn = TurnStats()
        self.clear()

    def clear(self) -> None:
        """Forgets everything but the system's message."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def ask(self, text: str) -> Iterator[str]:
        """Says something and gives the answer piece by piece; what is read of it is remembered.

        Raises:
            ValueError: the conversation is too long, or the template refuses it; the question is forgotten.
        """
        began = time.perf_counter()
        self.last_turn = turn = TurnStats(reason="abort")
        asked = [*self.messages, {"role": "user", "content": text}]
        prompt = render_chat(self._llm.get_tokenizer(), asked, add_generation_prompt=True, **self._template)
        written = ""
        try:
            with closing(self._llm.stream(prompt, self._params)) as outputs:
                for output in outputs:
                    turn.prompt_tokens = len(output.prompt_token_ids)
                    turn.cached_tokens = output.num_cached_tokens
                    for answer in output.outputs:
                        turn.tokens += len(answer.token_ids)
                        turn.reason = answer.finish_reason or "abort"
                        if turn.first is None:
                            turn.first = time.perf_counter() - began
                        turn.spent = time.perf_counter() - began - turn.first
                        written += answer.text
                        yield answer.text
        finally:
            if turn.first is not None:
                self.messages = [*asked, {"role": "assistant", "content": written}]
