"""Handlers of requests to pooling models."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_armllm.pooling.outputs import PoolingOutput, PoolingRequestOutput
from torch_armllm.pooling.pooling_engine import PoolingEngine
from torch_armllm.pooling.pooling_model import PoolingInput
from torch_armllm.pooling.pooling_params import PoolingParams, PoolingTask
from torch_armllm.server.errors import ApiError
from torch_armllm.server.served_model import ServedModel

_MOST_NUMBERS = 1 << 23
"""Most numbers of a response with a row per token."""


class Pooled(NamedTuple):
    """Results of a request's inputs, and the number of their tokens."""

    data: list[Tensor]
    num_tokens: int

    def usage(self) -> dict[str, int]:
        """Returns the usage in OpenAI's format."""
        return {"prompt_tokens": self.num_tokens, "total_tokens": self.num_tokens}


class PoolingHandler:
    """Handles one request to a pooling model.

    Args:
        served: the model.
        engine: its engine.
        kind: prefix of the request's id.
        priority: of the request.
    """

    def __init__(self, served: ServedModel, engine: PoolingEngine, kind: str, priority: int) -> None:
        self._served = served
        self._engine = engine
        self._priority = priority
        self.id = f"{kind}-{uuid.uuid4().hex}"
        self.created = int(time.time())

    async def pool(
        self,
        prompts: Sequence[str | list[int]],
        task: PoolingTask,
        params: PoolingParams,
        prompt_name: str | None = None,
    ) -> Pooled:
        """Pools texts.

        Raises:
            ApiError: the model does not compute the task, or a text or a parameter does not fit it.
        """
        build = self._engine.inputs.build
        with self._admitted(len(prompts)):
            makers = [partial(build, each, task, params, prompt_name) for each in prompts]
            inputs = await self._built(makers, "input")
            self._check_size(inputs, task)
            outputs = await self._encode(inputs)
        return Pooled([output.outputs.data for output in outputs], _tokens(outputs))

    async def score(self, queries: Sequence[str], documents: Sequence[str], params: PoolingParams) -> Pooled:
        """Scores documents, each with the query of its number or the only one.

        Raises:
            ApiError: the model cannot score, or a text or a parameter does not fit it.
        """
        if len(queries) not in (1, len(documents)):
            text = f"there are {len(queries)} queries for {len(documents)} documents: give one, or one each"
            raise ApiError(400, text, "text_1")
        tasks = self._engine.model.tasks
        if "score" in tasks:
            build = self._engine.inputs.build_pair
            pairs = [
                (queries[0] if len(queries) == 1 else queries[index], document)
                for index, document in enumerate(documents)
            ]
            with self._admitted(len(pairs)):
                makers = [partial(build, *pair, params) for pair in pairs]
                outputs = await self._encode(await self._built(makers, "documents"))
            return Pooled([output.outputs.data for output in outputs], _tokens(outputs))
        if "embed" not in tasks:
            text = (
                f"the model {self._served.name!r} cannot score: it computes {', '.join(tasks)}, and a score "
                "needs a classifier with one label, or vectors"
            )
            raise ApiError(400, text, "model", "wrong_kind_of_model")
        vectors = await self.pool([*queries, *documents], "embed", params)
        left, right = torch.stack(vectors.data[: len(queries)]), torch.stack(vectors.data[len(queries) :])
        scores = torch.cosine_similarity(left.expand_as(right), right, dim=1)
        return Pooled(list(scores[:, None]), vectors.num_tokens)

    def _check_size(self, inputs: Sequence[PoolingInput], task: PoolingTask) -> None:
        if not task.startswith("token_"):
            return
        tokens = sum(len(each.token_ids) for each in inputs)
        most = _MOST_NUMBERS // self._engine.model.width
        if tokens > most:
            text = (
                f"the input has {tokens} tokens in all, and {task} returns at most {most}: send fewer texts"
            )
            raise ApiError(400, text, "input")

    async def _built(self, makers: Sequence[Callable[[], PoolingInput]], param: str) -> list[PoolingInput]:
        """Tokenizes inputs; each in a turn of its own, so that other requests come in between."""
        return [await self._served.prompts.run(make, param) for make in makers]

    def _admitted(self, count: int) -> AbstractContextManager[None]:
        admission = self._served.admission
        return admission.admit(count, admission.max_running)

    async def _encode(self, inputs: Sequence[PoolingInput]) -> list[PoolingRequestOutput[PoolingOutput]]:
        return await self._served.encode(inputs, self.id, self._priority)


def encoded(data: Tensor, encoding_format: str | None) -> Any:
    """Returns a tensor as lists of numbers, or as float32 in base64."""
    if encoding_format == "base64":
        return base64.b64encode(data.contiguous().numpy().tobytes()).decode()
    return data.tolist()


def _tokens(outputs: Sequence[PoolingRequestOutput[PoolingOutput]]) -> int:
    return sum(len(output.prompt_token_ids) for output in outputs)
