"""Request schema of `/v1/embeddings`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from torch_armllm.server.protocol.body import RequestBody
from torch_armllm.server.protocol.completions import Prompts


class EmbeddingRequest(RequestBody):
    """An embedding request.

    Attributes:
        input: a text, a list of token ids, or a list of either.
        encoding_format: ``float``: lists of numbers; ``base64``: float32 in base64.
        dimensions: number of leading dimensions to return; `normalize` applies after the cut.
        pooling: ``mean`` of all tokens' hidden states, or the ``last`` token's.
        normalize: True to scale embeddings to length one.
    """

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    pooling: Literal["mean", "last"] = "mean"
    normalize: bool = True
