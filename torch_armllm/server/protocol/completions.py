"""Request schema of `/v1/completions`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from torch_armllm.server.protocol.body import MAX_CHOICES, MAX_PROMPTS, TokenIds
from torch_armllm.server.protocol.sampling import SamplingRequest

Prompts = (
    str
    | TokenIds
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
)


class CompletionRequest(SamplingRequest):
    """A completion request.

    Attributes:
        prompt: a text, a list of token ids, or a list of either.
        logprobs: number of most likely tokens to list at each position, in addition to the sampled token.
        echo: True to return the prompt before its continuation.
        add_special_tokens: False leaves out the tokens that the tokenizer puts around a text.
        suffix: text after the completion, for models that [fill in](#infilling).
        best_of: number of generated outputs, of which the `n` best are returned; not for streams.
    """

    prompt: Prompts
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False
    add_special_tokens: bool = True
    suffix: str | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
