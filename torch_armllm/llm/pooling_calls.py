"""The calls of `LLM` that pool: `embed`, `classify`, `score`, `encode`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from typing_extensions import Unpack

from torch_armllm.engine.text.preprocess import Prompt
from torch_armllm.llm.base import LLMBase
from torch_armllm.llm.calls.call_arguments import ForeignPoolingArguments, check_arguments
from torch_armllm.llm.calls.prompt_list import Prompts, as_prompt_list, named_errors
from torch_armllm.pooling.inputs import by_length
from torch_armllm.pooling.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    with_outputs,
)
from torch_armllm.pooling.pooling_engine import PoolingEngine, PoolingRequest
from torch_armllm.pooling.pooling_model import PoolingInput
from torch_armllm.pooling.pooling_params import PoolingParams, PoolingTask, chosen_task
from torch_armllm.system.forks import warn_if_forked
from torch_armllm.system.progress import progress_bar
from torch_armllm.system.sigint import interrupts_held

Pooled = PoolingRequestOutput[PoolingOutput]
Params = PoolingParams | Sequence[PoolingParams] | None


class PoolingCalls(LLMBase):
    """Offline pooling of many texts, sorted by length and batched; outputs are in the order of the inputs."""

    _pooled_numbers = itertools.count()

    def embed(
        self,
        prompts: Prompts,
        pooling_params: Params = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        prompt_name: str | None = None,
        **others: Unpack[ForeignPoolingArguments],
    ) -> list[EmbeddingRequestOutput]:
        """Makes a vector of each text.

        Args:
            prompts: one or several: text, token ids, ``{"prompt": …}`` or ``{"prompt_token_ids": …}``.
            pooling_params: for all texts, or one per text; None: the model's defaults.
            use_tqdm: True shows a progress bar; a callable makes the bar.
            prompt_name: name of the text that the model's files put before a text, such as ``query``.
            others: vLLM's further arguments, which are refused with the reason.

        Returns:
            One output per text, with ``outputs.embedding``.

        Raises:
            ValueError: the model makes no vectors, or a text or a parameter does not fit it.
        """
        check_arguments("embed", others)
        found = self.encode(prompts, pooling_params, use_tqdm, pooling_task="embed", prompt_name=prompt_name)
        return [with_outputs(each, EmbeddingOutput(each.outputs.data.tolist())) for each in found]

    def classify(
        self,
        prompts: Prompts,
        pooling_params: Params = None,
        use_tqdm: bool | Callable[..., Any] = True,
        **others: Unpack[ForeignPoolingArguments],
    ) -> list[ClassificationRequestOutput]:
        """Computes the probabilities of each text's classes.

        Args:
            prompts: see `embed`.
            pooling_params: see `embed`; ``use_activation=False`` gives logits.
            use_tqdm: see `embed`.
            others: see `embed`.

        Returns:
            One output per text, with ``outputs.probs``.

        Raises:
            ValueError: the model is no classifier, or a text or a parameter does not fit it.
        """
        check_arguments("classify", others)
        found = self.encode(prompts, pooling_params, use_tqdm, pooling_task="classify")
        return [with_outputs(each, ClassificationOutput(each.outputs.data.tolist())) for each in found]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        **others: Unpack[ForeignPoolingArguments],
    ) -> list[ScoringRequestOutput]:
        """Scores pairs of texts: a query and a document.

        A classifier with one label reads both; of a model that makes vectors it is their cosine.

        Args:
            data_1: one query for all documents, or one per document.
            data_2: the documents.
            pooling_params: ``use_activation=False`` gives logits.
            use_tqdm: see `embed`.
            others: see `embed`.

        Returns:
            One output per pair, with ``outputs.score``.

        Raises:
            ValueError: the model cannot score, the numbers of texts do not fit, or a text does not fit it.
        """
        check_arguments("score", others)
        queries = [data_1] if isinstance(data_1, str) else list(data_1)
        documents = [data_2] if isinstance(data_2, str) else list(data_2)
        if len(queries) not in (1, len(documents)):
            raise ValueError(
                f"there are {len(queries)} queries for {len(documents)} documents: give one, or one each"
            )
        engine = self._pooling("score")
        params = PoolingParams() if pooling_params is None else pooling_params
        if "score" not in engine.model.tasks:
            return self._cosines(engine, queries, documents, params, use_tqdm)
        inputs = []
        for index, document in enumerate(documents):
            query = queries[0] if len(queries) == 1 else queries[index]
            with named_errors("pair", index, len(documents)):
                inputs.append(engine.inputs.build_pair(query, document, params))
        found = self._pool(engine, inputs, use_tqdm)
        return [with_outputs(each, ScoringOutput(float(each.outputs.data))) for each in found]

    def encode(
        self,
        prompts: Prompts,
        pooling_params: Params = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        pooling_task: PoolingTask | None = None,
        prompt_name: str | None = None,
        **others: Unpack[ForeignPoolingArguments],
    ) -> list[Pooled]:
        """Pools each text.

        Args:
            prompts: see `embed`.
            pooling_params: see `embed`.
            use_tqdm: see `embed`.
            pooling_task: ``embed``, ``classify``, or ``token_embed`` and ``token_classify``, which return a
                row per token; None: what the model does.
            prompt_name: see `embed`.
            others: see `embed`.

        Returns:
            One output per text, with ``outputs.data``, a float32 tensor.

        Raises:
            ValueError: the model does not compute the task, or a text or a parameter does not fit it.
        """
        check_arguments("encode", others)
        engine = self._pooling("encode")
        texts: list[Prompt] = as_prompt_list(prompts)
        if pooling_params is None or isinstance(pooling_params, PoolingParams):
            several = [pooling_params or PoolingParams()] * len(texts)
        elif len(several := list(pooling_params)) != len(texts):
            raise ValueError(
                f"pooling_params has {len(several)} entries for {len(texts)} prompts; give one per prompt"
            )
        task = chosen_task(pooling_task, several, engine.model.tasks)
        inputs = []
        for index, (text, params) in enumerate(zip(texts, several, strict=True)):
            with named_errors("prompt", index, len(texts)):
                inputs.append(engine.inputs.build(text, task, params, prompt_name))
        return self._pool(engine, inputs, use_tqdm)

    def _pooling(self, call: str) -> PoolingEngine:
        if self.pooling_engine is None:
            raise ValueError(
                f"this LLM generates, and {call} is for models that pool: load it with runner='pooling'"
            )
        return self.pooling_engine

    def _check_generates(self, call: str) -> None:
        if self.pooling_engine is not None:
            tasks = ", ".join(self.pooling_engine.model.tasks)
            raise ValueError(
                f"this LLM pools ({tasks}), and {call} is for models that generate: call encode, or load the "
                "model with runner='generate'"
            )

    def _cosines(
        self,
        engine: PoolingEngine,
        queries: list[str],
        documents: list[str],
        params: PoolingParams,
        use_tqdm: bool | Callable[..., Any],
    ) -> list[ScoringRequestOutput]:
        if "embed" not in engine.model.tasks:
            raise ValueError(
                f"this model cannot score: it computes {', '.join(engine.model.tasks)}, and a score needs a "
                "classifier with one label, or vectors"
            )
        found = self.encode([*queries, *documents], params, use_tqdm, pooling_task="embed")
        left, right = found[: len(queries)], found[len(queries) :]
        outputs = []
        for index, document in enumerate(right):
            query = left[0] if len(left) == 1 else left[index]
            score = torch.cosine_similarity(query.outputs.data, document.outputs.data, dim=0)
            both = PoolingRequestOutput(
                document.request_id,
                ScoringOutput(float(score)),
                query.prompt_token_ids + document.prompt_token_ids,
                metrics=document.metrics,
            )
            outputs.append(both)
        return outputs

    def _pool(
        self, engine: PoolingEngine, inputs: list[PoolingInput], use_tqdm: bool | Callable[..., Any]
    ) -> list[Pooled]:
        """Submits all inputs and runs steps until they finish; aborts the rest in case of an error."""
        warn_if_forked()
        if engine.has_unfinished_requests():
            raise ValueError("this LLM is already computing; finish that first, or use AsyncLLM")
        make_bar = use_tqdm if callable(use_tqdm) else partial(progress_bar, show=use_tqdm)
        names = [str(next(self._pooled_numbers)) for _ in inputs]
        done: dict[str, Pooled] = {}
        with (
            interrupts_held() as let_through,
            make_bar(total=len(inputs), desc="Processed prompts", dynamic_ncols=True) as bar,
        ):
            try:
                for index in by_length(inputs):
                    engine.add_request(PoolingRequest(names[index], inputs[index]))
                while engine.has_unfinished_requests():
                    for output in engine.step():
                        done[output.request_id] = output
                        bar.update(1)
                    let_through()
            finally:
                engine.abort_request(names)
        return [done[name] for name in names]
