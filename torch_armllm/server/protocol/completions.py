"""`/v1/completions`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from torch_armllm.server.protocol.body import MOST_CHOICES, MOST_PROMPTS, TokenIds
from torch_armllm.server.protocol.sampling import Sampling

Prompts = (
    str
    | TokenIds
    | Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS)]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MOST_PROMPTS)]
)


class CompletionRequest(Sampling):
    """Texts that are to be continued.

    Attributes:
        prompt: a text, its tokens, or several of either.
        logprobs: so many best tokens' log-probabilities are told at each place, and the drawn one's.
        echo: gives the prompt back before its continuation.
        suffix: what follows; no model here writes towards one.
        best_of: answers that are written, of which the `n` best are given; not where they are streamed.
    """

    prompt: Prompts
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False
    suffix: str | None = None
    best_of: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
