"""Text embeddings from the model's hidden states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_armllm.hf.base_model import base_model_of
from torch_armllm.hf.cache_names import cache_argument, cache_of
from torch_armllm.patching.state import patched_forward
from torch_armllm.server.errors import ApiError
from torch_armllm.server.protocol.embeddings import EmbeddingRequest
from torch_armllm.server.served_model import ServedModel
from torch_armllm.server.worker_thread import run_in_worker_thread
from torch_armllm.system.exclusive import PROCESS_LOCK

_CHUNK_TOKENS = 256
"""Tokens computed between two engine steps; bounds the delay of running sequences."""


async def embed(served: ServedModel, tokens: list[int], body: EmbeddingRequest) -> Tensor:
    """Returns the embedding of a text, float32 ``(hidden,)`` or ``(dimensions,)``.

    Args:
        served: the model.
        tokens: token ids of the text.
        body: the request; defines how hidden states are pooled.

    Raises:
        ApiError: the text is empty or too long, or has unknown token ids, or the model has fewer dimensions
            than requested.
    """
    served.check_tokens(tokens, "input", generates=False)
    _check_dimensions(body.dimensions, served.llm.hidden_size)
    if served.llm.replicas is not None:
        text = f"the model {served.name!r} has replicas, which give no embeddings: serve one that pools"
        raise ApiError(400, text, "model", "wrong_kind_of_model")
    model = await run_in_worker_thread(lambda: served.llm.model)  # may load the model first
    prefill = _ChunkedPrefill(model, tokens)
    while not prefill.finished:
        await served.between_steps(prefill.compute_chunk)
    vector = prefill.last if body.pooling == "last" else prefill.total / len(tokens)
    if body.dimensions is not None:
        _check_dimensions(body.dimensions, len(vector))
        vector = vector[: body.dimensions]
    return vector if body.normalize is False else torch.nn.functional.normalize(vector, dim=0)


def _check_dimensions(dimensions: int | None, hidden_size: int | None) -> None:
    if dimensions is not None and hidden_size is not None and dimensions > hidden_size:
        text = f"dimensions is {dimensions}; the model's embeddings have {hidden_size}"
        raise ApiError(400, text, "dimensions")


class _ChunkedPrefill:
    """Computes hidden states of a text in chunks, with a cache separate from the engine's blocks.

    Attributes:
        finished: True when all tokens were computed.
        total: sum of all tokens' hidden states, float32 ``(hidden,)``.
        last: hidden state of the last token, float32 ``(hidden,)``.
    """

    def __init__(self, model: Any, tokens: list[int]) -> None:
        self.finished = False
        self.total = self.last = torch.zeros(())
        self._base = base_model_of(model)
        self._cache_name = cache_argument(self._base.forward)
        # Not every model can continue a recurrent state from the middle of a text.
        self._chunk = _CHUNK_TOKENS if patched_forward(model) is not None else len(tokens)
        self._tokens = tokens
        self._begin = 0
        self._cache: Any = None

    @torch.no_grad()
    def compute_chunk(self) -> None:
        """Computes the next chunk."""
        end = self._begin + self._chunk
        ids = torch.tensor([self._tokens[self._begin : end]])
        single = len(self._tokens) <= self._chunk
        with PROCESS_LOCK.shared():
            out = self._base(input_ids=ids, use_cache=not single, **{self._cache_name: self._cache})
        hidden = out.last_hidden_state[0].float()
        self._cache = None if single else cache_of(out)
        self.total = self.total + hidden.sum(0)
        self.last = hidden[-1].clone()
        self._begin = end
        self.finished = end >= len(self._tokens)
