"""Requests and their sequences."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from torch_armllm.engine.images.image_rows import PictureRows
from torch_armllm.engine.outputs import FinishReason, Logprobs, RequestMetrics
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.kv_cache.prefix_cache import NOTHING

if TYPE_CHECKING:
    from torch_armllm.lora.adapter_table import LoadedAdapter


class Status(Enum):
    """State of a sequence."""

    WAITING = auto()
    """Waits for admission, without blocks."""
    RUNNING = auto()
    """Admitted: holds blocks and is part of steps."""
    SWAPPED = auto()
    """Preempted, with its blocks in swap memory."""
    FINISHED = auto()
    """Finished; holds no blocks."""


_FINISHED = Status.FINISHED
"""A module-level name: it is read in every step, and looking a member up in its enumeration costs more."""


@dataclass(eq=False)
class Request:
    """A prompt with its sampling parameters, and the sequences that continue it.

    Attributes:
        request_id: unique among unfinished requests.
        prompt_token_ids: at least one token.
        params: sampling parameters.
        seed: `params.seed`, or a seed drawn at submission.
        priority: smaller values are served first; equal ones in order of arrival.
        adapter: that its tokens are computed with; None: the model alone.
        sequences: one until the prompt is computed, then `params.num_sequences`.
        pictures: embeddings of the prompt's picture tokens; None: it has none.
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
    adapter: LoadedAdapter | None = None
    pictures: PictureRows | None = None

    def __post_init__(self) -> None:
        if not self.sequences:
            self.sequences = [Sequence(self, 0, list(self.prompt_token_ids))]

    @property
    def finished(self) -> bool:
        """True if all sequences are finished."""
        # read in every step, where a generator would cost more than the loop
        for sequence in self.sequences:  # noqa: SIM110
            if sequence.status is not _FINISHED:
                return False
        return True


@dataclass(eq=False)
class Sequence:
    """A prompt with one of its continuations: the unit that the scheduler assigns blocks and tokens to.

    Attributes:
        index: position among the request's sequences.
        token_ids: prompt tokens, then output tokens.
        blocks: hold its keys and values, in order.
        state: slot of its recurrent layers' states, or their swap slot; None if it has none.
        saves: slots of further states, by the number of tokens that they follow.
        computed: number of positions whose keys and values are in the blocks.
        draft: draft tokens after `token_ids`, which the next step verifies.
        logprobs: of the output tokens, if requested.
        prompt_length: number of prompt tokens.
    """

    request: Request
    index: int
    token_ids: list[int]
    blocks: list[int] = field(default_factory=list)
    state: int | None = None
    saves: dict[int, int] = field(default_factory=dict)
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
        """Sampling parameters of the request."""
        return self.request.params

    @property
    def prefix_root(self) -> int:
        """Number in front of its tokens in the prefix cache, which holds them for each adapter."""
        adapter = self.request.adapter
        return NOTHING if adapter is None else adapter.prefix

    @property
    def cache_ids(self) -> list[int]:
        """Numbers by which the prefix cache tells tokens apart: their ids, and the keys of pictures."""
        pictures = self.request.pictures
        return self.token_ids if pictures is None else pictures.cache_ids(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """Tokens after the prompt."""
        return self.token_ids[self.prompt_length :]

    @property
    def output_length(self) -> int:
        """Number of tokens after the prompt."""
        return len(self.token_ids) - self.prompt_length
