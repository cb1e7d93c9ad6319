"""Vectors of texts, from the model's hidden states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_armllm.hf.base_model import body_of
from torch_armllm.patching.state import patched_forward
from torch_armllm.server.errors import ApiError
from torch_armllm.server.protocol.embeddings import EmbeddingRequest
from torch_armllm.server.served_model import Serving
from torch_armllm.server.worker_thread import in_own_thread
from torch_armllm.system.exclusive import TURNS

_PIECE = 256
"""Tokens that are read between two steps of the engine: running answers wait no longer than for these."""


async def embed(serving: Serving, tokens: list[int], body: EmbeddingRequest) -> Tensor:
    """The vector of a text, float32 ``(hidden,)`` or ``(dimensions,)``.

    Args:
        serving: the model.
        tokens: of the text.
        body: says how hidden states become a vector.

    Raises:
        ApiError: the text is empty or too long, or has unknown tokens; or the model has fewer dimensions.
    """
    serving.check_tokens(tokens, "input", answered=False)
    model = await in_own_thread(lambda: serving.llm.model)  # which may have to be loaded first
    reading = _Reading(model, tokens)
    while not reading.finished:
        await serving.llm.between_steps(reading.read_on)
    vector = reading.last if body.pooling == "last" else reading.total / len(tokens)
    if body.dimensions is not None:
        if body.dimensions > len(vector):
            raise ApiError(400, f"the model's vectors have {len(vector)} dimensions", "dimensions")
        vector = vector[: body.dimensions]
    return torch.nn.functional.normalize(vector, dim=0) if body.normalize else vector


class _Reading:
    """Reads a text in pieces, apart from the engine's own blocks.

    Attributes:
        finished: whether all tokens were read.
        total: sum of all tokens' hidden states, float32 ``(hidden,)``.
        last: the last token's.
    """

    def __init__(self, model: Any, tokens: list[int]) -> None:
        self.finished = False
        self.total = self.last = torch.zeros(())
        self._body = body_of(model)
        # A recurrent state does not go on from the middle in every model.
        self._size = _PIECE if patched_forward(model) is not None else len(tokens)
        self._tokens = tokens
        self._begin = 0
        self._cache: Any = None

    @torch.no_grad()
    def read_on(self) -> None:
        """Reads the next piece."""
        end = self._begin + self._size
        ids = torch.tensor([self._tokens[self._begin : end]])
        whole = len(self._tokens) <= self._size
        with TURNS.together():
            out = self._body(input_ids=ids, past_key_values=self._cache, use_cache=not whole)
        hidden = out.last_hidden_state[0].float()
        self._cache = None if whole else out.past_key_values
        self.total = self.total + hidden.sum(0)
        self.last = hidden[-1].clone()
        self._begin = end
        self.finished = end >= len(self._tokens)
