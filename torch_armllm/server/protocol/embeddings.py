"""Request schema of `/v1/embeddings`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from torch_armllm.pooling.pooling_params import PoolingParams
from torch_armllm.server.protocol.completions import Prompts
from torch_armllm.server.protocol.pooling import PoolingBody


class EmbeddingRequest(PoolingBody):
    """An embedding request.

    Attributes:
        input: a text, a list of token ids, or a list of either.
        encoding_format: ``float``: lists of numbers; ``base64``: float32 in base64.
        dimensions: number of leading dimensions to return; `normalize` applies after the cut.
        pooling: of a generating model: ``mean`` of all tokens' hidden states, which is the default, or the
            ``last`` token's. A pooling model's files define it.
        normalize: True to scale embeddings to length one; None: as the model's files say, which is True
            without such files.
        prompt_name: name of the text that a pooling model's files put before a text, such as ``query``.
    """

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    pooling: Literal["mean", "last"] | None = None
    normalize: bool | None = None
    prompt_name: Annotated[str, Field(max_length=200)] | None = None

    def params(self) -> PoolingParams:
        """Returns the parameters of a request to a pooling model."""
        return PoolingParams(
            dimensions=self.dimensions,
            normalize=self.normalize,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
        )
