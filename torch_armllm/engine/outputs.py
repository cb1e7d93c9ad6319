"""Outputs of a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort"]
"""``stop``: EOS, a stop token or string; ``length``: `max_tokens` or `max_model_len`; ``abort``."""


class Logprob(NamedTuple):
    """Log-probability of a token at one position, from the unprocessed logits."""

    logprob: float
    rank: int | None = None
    """1 for the most probable token; outputs of an engine have all of them."""
    decoded_token: str | None = None


Logprobs = dict[int, Logprob]
"""By token id: the sampled token and the best tokens."""


@dataclass
class ToolCall:
    """A call of a tool.

    Attributes:
        id: the model's own, or a random one.
        name: of the tool.
        arguments: JSON, as the model has written it.
    """

    id: str
    name: str
    arguments: str

    def to_dict(self) -> dict[str, Any]:
        """Returns the call in OpenAI's form."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


@dataclass
class ChatMessage:
    """An output as a message of the assistant.

    Attributes:
        content: the answer, without reasoning and calls.
        reasoning: the reasoning, without its tags.
        tool_calls: in the order of the output.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Returns the message in OpenAI's form, for the conversation that goes on with it."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.to_dict() for call in self.tool_calls]
        return message


@dataclass
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
        index: position among the request's completions.
        text: text so far, without the stop string.
        token_ids: all tokens so far, the stop token included.
        cumulative_logprob: sum of the sampled tokens' log-probabilities, if requested.
        logprobs: one entry per token, if requested.
        finish_reason: None while the completion grows.
        stop_reason: the stop string or token id that ended it; None for the model's EOS token.
        message: the text as a message, with reasoning and tool calls; of outputs of `LLM.chat`.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[Logprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    message: ChatMessage | None = None

    @property
    def finished(self) -> bool:
        """True if the completion has finished."""
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """Timestamps of a request, in seconds of `time.monotonic`, and its preemptions.

    Attributes:
        arrival_time: submission.
        scheduled_time: computation of its first tokens.
        first_token_time: first output token.
        finished_time: end of its last sequence.
        preemptions: number of preemptions of its sequences.
    """

    arrival_time: float
    scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    preemptions: int = 0


@dataclass
class RequestOutput:
    """Completions of a request so far; the order of the fields is vLLM's.

    Attributes:
        request_id: as submitted.
        prompt: the text, if one was given.
        prompt_token_ids: its tokens.
        prompt_logprobs: one entry per prompt token, None for the first, if requested.
        outputs: one per completion.
        finished: True if all of them have finished.
        metrics: timestamps.
        num_cached_tokens: prompt tokens that the prefix cache held.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[Logprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(0.0))
    num_cached_tokens: int = 0


@dataclass
class FailedOutput:
    """The end of a request that has no further output, in the place of one.

    Attributes:
        request_id: as submitted.
        error: for whoever waits for the request.
    """

    request_id: str
    error: Exception
    finished: bool = True
