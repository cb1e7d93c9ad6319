"""Request schemas of `/pooling`, `/classify`, `/score` and `/rerank`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AliasChoices, Field, field_validator

from torch_armllm.pooling.pooling_params import PoolingParams, PoolingTask
from torch_armllm.server.protocol.body import MAX_PROMPTS, RequestBody, RequestPart
from torch_armllm.server.protocol.completions import Prompts

Texts = str | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]


class PoolingBody(RequestBody):
    """A request to a pooling model.

    Attributes:
        truncate_prompt_tokens: most tokens of a text, which is cut at its end; -1: as many as the model
            takes; None: a longer text is an error.
        priority: lower values run first.
    """

    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _is_a_length(cls, value: int | None) -> int | None:
        PoolingParams(truncate_prompt_tokens=value)
        return value


class ActivatedBody(PoolingBody):
    """A request for probabilities or scores.

    Attributes:
        use_activation: False returns logits.
    """

    use_activation: bool | None = None

    def params(self) -> PoolingParams:
        """Returns the parameters of the request."""
        return PoolingParams(
            use_activation=self.use_activation, truncate_prompt_tokens=self.truncate_prompt_tokens
        )


class PoolingRequest(PoolingBody):
    """A request for what a model computes of texts or of their tokens.

    Attributes:
        input: a text, a list of token ids, or a list of either.
        task: ``embed``, ``classify``, ``token_embed`` or ``token_classify``; None: what the model does.
        encoding_format: ``float``: lists of numbers; ``base64``: float32 in base64.
        dimensions: number of leading dimensions of vectors; None: all.
        normalize: True scales vectors to length one; None: as the model's files say.
        use_activation: False returns logits.
        prompt_name: name of the text that the model's files put before a text.
    """

    input: Prompts
    task: PoolingTask | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    prompt_name: Annotated[str, Field(max_length=200)] | None = None

    def params(self) -> PoolingParams:
        """Returns the parameters of the request."""
        return PoolingParams(
            dimensions=self.dimensions,
            normalize=self.normalize,
            use_activation=self.use_activation,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
        )


class ClassifyRequest(ActivatedBody):
    """A request for the classes of texts.

    Attributes:
        input: a text, a list of token ids, or a list of either.
    """

    input: Prompts


class ScoreRequest(ActivatedBody):
    """A request for the scores of pairs of texts.

    Attributes:
        text_1: one query for all documents, or one per document; also `queries` or `data_1`.
        text_2: the documents; also `documents` or `data_2`.
    """

    text_1: Annotated[Texts, Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))]
    text_2: Annotated[Texts, Field(validation_alias=AliasChoices("text_2", "documents", "data_2"))]


class Document(RequestPart):
    """A document to rank."""

    text: str


class RerankRequest(ActivatedBody):
    """A request to sort documents by how well they answer a query.

    Attributes:
        query: the query.
        documents: texts, or objects with a `text`.
        top_n: number of the best documents to return; 0 or None: all.
        return_documents: False leaves the texts of the documents out of the response.
    """

    query: str
    documents: Annotated[list[str | Document], Field(min_length=1, max_length=MAX_PROMPTS)]
    top_n: Annotated[int, Field(ge=0)] | None = None
    return_documents: bool = True
