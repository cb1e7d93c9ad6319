"""Handler of infilling in llama.cpp's format."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from torch_armllm.engine.outputs import CompletionOutput, RequestOutput
from torch_armllm.engine.sampling_params import RequestOutputKind
from torch_armllm.server.handlers.sampling_params import sampling_params
from torch_armllm.server.handlers.streaming import Event
from torch_armllm.server.infill.prompt import ExtraFile
from torch_armllm.server.protocol.infill import InfillRequest
from torch_armllm.server.protocol.sampling import SamplingRequest
from torch_armllm.server.served_model import ServedModel

_SAME = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "stop")


class InfillHandler:
    """Handles one request for the middle of a text.

    Args:
        served: the model.
        body: the request.

    Raises:
        ApiError: the request is invalid, or the model has no tokens for infilling.
    """

    def __init__(self, served: ServedModel, body: InfillRequest) -> None:
        self._served = served
        self._body = body
        self._prompts = served.prompts.infill("input_suffix")
        self._params = self._make_params()
        self._began = time.perf_counter()
        self._first: float | None = None
        self._predicted = 0

    def _make_params(self) -> Any:
        body, served = self._body, self._served
        sampling = SamplingRequest(
            **{name: getattr(body, name) for name in _SAME},
            repetition_penalty=body.repeat_penalty,
            seed=None if body.seed == -1 else body.seed,
            stop_token_ids=self._prompts.end_ids,
        )
        max_tokens = None if body.n_predict < 0 else max(1, body.n_predict)
        params = sampling_params(sampling, served.defaults, max_tokens, served.settings.max_tokens)
        return replace(params, output_kind=RequestOutputKind.DELTA)

    async def complete(self) -> dict[str, Any]:
        """Returns the complete response."""
        content, last = "", {}
        async with aclosing(self.events()) as events:
            async for event in events:
                content += event["content"]
                last = event
        return {**last, "content": content}

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yields the response as stream events; the last one has ``stop`` and the figures."""
        has_line = False
        async with aclosing(self._outputs()) as outputs:
            async for output in outputs:
                (completion,) = output.outputs
                self._first = self._first or time.perf_counter()
                self._predicted += len(completion.token_ids)
                content = completion.text if self._body.n_predict else ""
                has_line = has_line or "\n" in content
                late = has_line and self._is_late()
                if completion.finished or late:
                    yield {"index": 0, "content": content, "stop": True, **self._figures(output, completion)}
                    return
                yield {"index": 0, "content": content, "stop": False}

    async def _outputs(self) -> AsyncGenerator[RequestOutput, None]:
        """Yields the engine's outputs, after the request was admitted."""
        served, body = self._served, self._body
        with served.admission.admit(1):
            extra = [ExtraFile(each.filename or "tmp", each.text) for each in body.input_extra or []]
            most = served.max_model_len - max(1, body.n_predict)
            texts = body.input_prefix, body.input_suffix, extra, body.prompt, most
            prompt = await served.prompts.from_infill(*texts)
            served.check_tokens(prompt["prompt_token_ids"], "input_prefix")
            generated = served.generate(prompt, self._params, f"infill-{uuid.uuid4().hex}", body.priority)
            async with aclosing(generated) as outputs:
                async for output in outputs:
                    yield output

    def _is_late(self) -> bool:
        limit = self._body.t_max_predict_ms
        return bool(limit) and self._first is not None and time.perf_counter() - self._first > limit / 1000

    def _figures(self, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        """Returns llama.cpp's fields of the last event."""
        assert self._first is not None
        word = completion.stop_reason if isinstance(completion.stop_reason, str) else ""
        kind = {"stop": "word" if word else "eos"}.get(completion.finish_reason or "", "limit")
        prompt, predicted = len(output.prompt_token_ids), self._predicted if self._body.n_predict else 0
        before, after = 1000 * (self._first - self._began), 1000 * (time.perf_counter() - self._first)
        return {
            "model": self._served.name,
            "stop_type": kind,
            "stopping_word": word,
            "tokens_predicted": predicted,
            "tokens_evaluated": prompt,
            "tokens_cached": output.num_cached_tokens,
            "truncated": False,
            "timings": {
                "cache_n": output.num_cached_tokens,
                "prompt_n": prompt - output.num_cached_tokens,
                "prompt_ms": before,
                "predicted_n": predicted,
                "predicted_ms": after,
                "predicted_per_second": 1000 * max(0, predicted - 1) / after if after else 0.0,
            },
        }
