"""A stub engine without a model, for tests of the layers above the engine."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from torch_armllm.engine.engine_protocol import TextEngine
from torch_armllm.engine.errors import StepFailedError
from torch_armllm.engine.outputs import CompletionOutput, FinishReason, RequestOutput
from torch_armllm.engine.sampling_params import RequestOutputKind, SamplingParams
from torch_armllm.engine.text.preprocess import NewRequest
from torch_armllm.patching.state import STATE


class StubModel:
    """Answers what is asked about the model of a `StubEngine`."""

    generation_config = None

    def __init__(self) -> None:
        setattr(self, STATE, SimpleNamespace(kind=SimpleNamespace(hidden_size=8)))


class StubEngine(TextEngine):
    """Repeats the tokens of each prompt, one token per step, up to ``max_tokens``.

    Args:
        max_running: requests that advance in a step.
        seconds: duration of a step.

    Attributes:
        fail_at: number of the step that fails with an error that ends the engine.
        fail_once_at: number of the step that fails and ends only its requests.
    """

    def __init__(self, max_running: int = 1000, seconds: float = 0.0) -> None:
        self.requests: dict[str, tuple[str | None, list[int], SamplingParams]] = {}
        self.lengths: dict[str, int] = {}
        self.served: list[str] = []
        self.steps = 0
        self.max_running = max_running
        self.seconds = seconds
        blocks = SimpleNamespace(num_blocks=8, block_size=16)
        self.scheduler = SimpleNamespace(blocks=blocks, config=SimpleNamespace(max_num_seqs=max_running))
        self.runner = SimpleNamespace(vocab_size=128, kv_bytes=0)
        self.sampler = SimpleNamespace(vocab_size=128, knows_reasoning=False)
        self.preprocessor: Any = SimpleNamespace(max_model_len=1000, pictures="it has no tower")
        self.speculative_decoder = None
        self.fail_at: int | None = None
        self.fail_once_at: int | None = None

    def add_request(self, new: NewRequest) -> None:
        assert new.lora_request is None
        new.check_id(self.requests)
        prompt: Any = new.prompt
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else None
        tokens = prompt["prompt_token_ids"] if isinstance(prompt, Mapping) else prompt
        tokens = list(tokens.encode()) if isinstance(tokens, str) else list(tokens)
        if not tokens:
            raise ValueError("the prompt holds no token")
        self.requests[new.request_id] = text, tokens, new.params
        self.lengths[new.request_id] = 0
        self.served.append(new.request_id)

    def abort_request(self, request_ids: str | Iterable[str]) -> list[RequestOutput]:
        names = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        outputs = [self._output(name, "abort") for name in names if name in self.requests]
        return [output for output in outputs if output is not None]

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[RequestOutput]:
        assert self.requests, "a step without requests"
        self.steps += 1
        time.sleep(self.seconds)
        if self.steps == self.fail_at:
            raise RuntimeError("out of order")
        if self.steps == self.fail_once_at:
            names = list(self.requests)[: self.max_running]
            for name in names:
                del self.requests[name]
            raise StepFailedError(names, RuntimeError("bad luck"))
        outputs = []
        for name in list(self.requests)[: self.max_running]:
            self.lengths[name] += 1
            most = self.requests[name][2].max_tokens
            outputs.append(self._output(name, "length" if self.lengths[name] == most else None))
        return [output for output in outputs if output is not None]

    def _output(self, name: str, finish: FinishReason | None) -> RequestOutput | None:
        text, prompt, params = self.requests[name]
        tokens = [prompt[i % len(prompt)] for i in range(self.lengths[name])]
        if finish is not None:
            del self.requests[name]
        elif params.output_kind is RequestOutputKind.FINAL_ONLY:
            return None
        if params.output_kind is RequestOutputKind.DELTA:
            tokens = tokens[-1:]
        completion = CompletionOutput(0, "".join(map(chr, tokens)), tokens, finish_reason=finish)
        return RequestOutput(name, text, prompt, None, [completion], finish is not None)
