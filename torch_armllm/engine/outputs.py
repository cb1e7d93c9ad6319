"""What a request gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort"]
"""``stop``: an end token or a stop text; ``length``: `max_tokens` or `max_model_len`; ``abort``."""


class Logprob(NamedTuple):
    """A token's log-probability at one place, by the model's logits as they came."""

    logprob: float
    rank: int
    """1 for the most probable token."""
    decoded_token: str | None = None


Logprobs = dict[int, Logprob]
"""By token id: the drawn token and the best ones."""


@dataclass
class CompletionOutput:
    """One answer.

    Attributes:
        index: which of the request's `n` answers.
        text: of all tokens so far, without the text that ended it.
        token_ids: all so far, the one that ended the answer included.
        cumulative_logprob: sum of the drawn tokens' log-probabilities, where they were asked for.
        logprobs: of each token, where they were asked for.
        finish_reason: None while the answer grows.
        stop_reason: the stop text or the token id that ended the answer; None for the model's own end token.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[Logprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        """Whether the answer has come to its end."""
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """When things happened to a request, in seconds of `time.monotonic`.

    Attributes:
        arrival_time: when it was submitted.
        scheduled_time: when its first tokens were computed.
        first_token_time: when its first answer token was there.
        finished_time: when its last answer ended.
        preemptions: how often it lost its blocks to others.
    """

    arrival_time: float
    scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    preemptions: int = 0


@dataclass
class RequestOutput:
    """A request's answers so far.

    Attributes:
        request_id: as it was submitted.
        prompt: the text, where one was given.
        prompt_token_ids: its tokens.
        outputs: one for each of `n`.
        finished: whether all of them have come to their end.
        prompt_logprobs: of each token of the prompt, None for the first, where they were asked for.
        num_cached_tokens: tokens of the prompt that the prefix cache held.
        metrics: when things happened.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[Logprobs | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(0.0))
