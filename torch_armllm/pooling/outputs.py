"""Outputs of pooling requests; names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import Tensor

from torch_armllm.engine.outputs import RequestMetrics

T = TypeVar("T")


@dataclass
class PoolingOutput:
    """The result of a text.

    Attributes:
        data: float32 ``(dimensions,)``, ``(classes,)``, or one such row per token.
    """

    data: Tensor


@dataclass
class EmbeddingOutput:
    """The vector of a text.

    Attributes:
        embedding: its elements.
    """

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Number of dimensions."""
        return len(self.embedding)


@dataclass
class ClassificationOutput:
    """The classes of a text.

    Attributes:
        probs: a probability per class; logits with ``use_activation=False``.
    """

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.probs)


@dataclass
class ScoringOutput:
    """The score of a pair of texts.

    Attributes:
        score: a probability, a logit, or the cosine of two embeddings.
    """

    score: float


@dataclass
class PoolingRequestOutput(Generic[T]):
    """The result of a pooling request; the order of the fields is vLLM's.

    Attributes:
        request_id: as submitted.
        outputs: the result.
        prompt_token_ids: tokens of the text, or of both texts of a pair.
        num_cached_tokens: always 0.
        finished: always True.
        metrics: times of the request.
    """

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(0.0), repr=False)


EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]


def with_outputs(base: PoolingRequestOutput[PoolingOutput], outputs: T) -> PoolingRequestOutput[T]:
    """Returns the result of a request with its data in another form."""
    return PoolingRequestOutput(base.request_id, outputs, base.prompt_token_ids, metrics=base.metrics)
