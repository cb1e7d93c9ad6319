"""Steps of an engine, one by one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from bench.peers.work import random_tokens
from torch_armllm.engine.llm_engine import LLMEngine
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.text.preprocess import NewRequest

QUIET: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "progress": False,
    "speculative_config": None,
    "disable_log_stats": True,
}
"""Settings of engines whose steps are timed: one token a step, nothing to read or to say."""


def greedy(tokens: int | None) -> SamplingParams:
    """Returns the parameters of a request of so many tokens; None: without an end."""
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def timed(run: Callable[[], Any]) -> float:
    """Returns the seconds of a call."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def step_seconds(engine: LLMEngine, batch: int, tokens: int = 32, adapters: Sequence[Any] = ()) -> float:
    """Returns the median seconds of a decode step of ``batch`` sequences, each with its adapter if any."""
    for number in range(batch):
        prompt = {"prompt_token_ids": random_tokens(128, engine.runner.vocab_size, number)}
        adapter = adapters[number] if adapters else None
        engine.add_request(NewRequest(str(number), prompt, greedy(tokens + 1), lora_request=adapter))
    seconds = []
    while engine.has_unfinished_requests():
        seconds.append(timed(engine.step))
    return median(seconds[2 - tokens :])
