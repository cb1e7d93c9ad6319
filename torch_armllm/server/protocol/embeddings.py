"""`/v1/embeddings`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from torch_armllm.server.protocol.body import Body
from torch_armllm.server.protocol.completions import Prompts


class EmbeddingRequest(Body):
    """Texts whose vectors are wanted.

    Attributes:
        input: a text, its tokens, or several of either.
        encoding_format: lists of numbers, or float32 in base64.
        dimensions: only so many first ones, made to length one again.
        pooling: the mean of all tokens' hidden states, or the last one's.
        normalize: whether vectors have length one.
    """

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    pooling: Literal["mean", "last"] = "mean"
    normalize: bool = True
