"""Completions and the rates at which their tokens arrived."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedTokenizerBase, TextStreamer


@dataclass(frozen=True)
class Completion:
    """A generated text and its decode rate.

    Attributes:
        text: the text.
        ids: the tokens of the prompt and of the text ``(1, length)``.
        tokens: number of tokens of the text.
        tokens_per_second: rate of decoding, without the first token.
    """

    text: str
    ids: Tensor
    tokens: int
    tokens_per_second: float


class TimedStreamer(TextStreamer):
    """Streams finished pieces of text to a callback and records when tokens arrived."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_text = on_text
        self.text = ""
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Receives the prompt first, then each token."""
        self.times.append(time.perf_counter())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Receives each piece of text that no later token can change."""
        self.text += text
        self.on_text(text)

    def completion(self, ids: Tensor) -> Completion:
        """Returns the completion; ``ids`` are the tokens of the prompt and of the text ``(1, length)``."""
        steps = len(self.times) - 2
        spent = self.times[-1] - self.times[1] if steps > 0 else 0.0
        return Completion(self.text, ids, max(len(self.times) - 1, 0), steps / spent if spent > 0 else 0.0)
