"""What the engine works on: requests and their sequences."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from torch_armllm.engine.outputs import FinishReason, Logprobs, RequestMetrics
from torch_armllm.engine.sampling_params import SamplingParams


class Status(Enum):
    """Where a sequence is in its life."""

    WAITING = auto()
    """Has no blocks."""
    RUNNING = auto()
    """Holds blocks and takes part in steps."""
    SWAPPED = auto()
    """Its blocks lie in swap memory."""
    FINISHED = auto()
    """Holds nothing any more."""


_FINISHED = Status.FINISHED
"""To ask an enumeration for its members takes longer than what is done with them in every step."""


@dataclass(eq=False)
class Request:
    """A prompt and how it is to be answered.

    Attributes:
        request_id: unique among those that are not finished.
        prompt_token_ids: at least one.
        params: how tokens are drawn.
        seed: `params.seed`, or one drawn at submission.
        priority: lower ones are served first; equal ones in the order in which they came.
        sequences: the first alone until the prompt is read, then `params.num_sequences`.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    prompt: str | None = None
    priority: int = 0
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(0.0))
    sequences: list[Sequence] = field(default_factory=list)
    prompt_logprobs: list[Logprobs | None] | None = None
    num_cached_tokens: int = 0

    def __post_init__(self) -> None:
        if not self.sequences:
            self.sequences = [Sequence(self, 0, list(self.prompt_token_ids))]

    @property
    def finished(self) -> bool:
        """Whether every sequence has come to its end."""
        # asked in every step, where a generator would cost more than all else
        for sequence in self.sequences:  # noqa: SIM110
            if sequence.status is not _FINISHED:
                return False
        return True


@dataclass(eq=False)
class Sequence:
    """One of a request's sequences: what the scheduler gives blocks and tokens of steps to.

    Attributes:
        index: which of the request's `n`.
        token_ids: the prompt's and the sequence's, all that is known.
        blocks: hold its keys and values, in order.
        computed: positions whose keys and values stand in the blocks.
        draft: tokens that are guessed to follow `token_ids` and are verified by the next step.
        logprobs: of the sequence's tokens, where they are asked for.
        prompt_length: tokens of the prompt.
    """

    request: Request
    index: int
    token_ids: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    status: Status = Status.WAITING
    draft: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    prompt_length: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.request.prompt_token_ids)

    @property
    def params(self) -> SamplingParams:
        """How its tokens are drawn."""
        return self.request.params

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens of the sequence."""
        return self.token_ids[self.prompt_length :]

    @property
    def output_length(self) -> int:
        """How many tokens the sequence has."""
        return len(self.token_ids) - self.prompt_length
