"""Engines over tiny patched models, and helpers that run requests through them."""

from __future__ import annotations

from typing import Any

from tests.support.patched_models import patched
from torch_armllm.engine.build import build_engine
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.execution.executor_sizes import ExecutorSizes
from torch_armllm.engine.execution.plan_runner import PlanRunner
from torch_armllm.engine.execution.step_executor import StepExecutor
from torch_armllm.engine.llm_engine import LLMEngine
from torch_armllm.engine.outputs import RequestOutput
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.text.preprocess import NewRequest
from torch_armllm.patching.patched_model import servable_model
from torch_armllm.patching.state import patched_forward

MEMORY = 4 << 20


def make_engine(family: str = "llama", **settings: Any) -> LLMEngine:
    """Builds an engine without a tokenizer: prompts and outputs are token ids."""
    settings = {"kv_cache_memory": MEMORY, "max_num_batched_tokens": 64, **settings}
    return build_engine(patched(family), None, EngineConfig(**settings))


def engine_with_blocks(family: str, blocks: int, swap_blocks: int = 0, **limits: Any) -> LLMEngine:
    """Builds an engine with exactly ``blocks`` KV cache blocks and ``swap_blocks`` swap blocks."""
    forward = patched_forward(patched(family))
    assert forward is not None
    block = forward.shape.block_size * forward.shape.bytes_per_token
    sizes = {"kv_cache_memory": blocks * block, "swap_space": swap_blocks * block}
    engine = make_engine(family, **{**sizes, **limits})
    assert engine.scheduler.blocks.num_blocks == blocks and engine.scheduler.blocks.swap_blocks == swap_blocks
    return engine


def plan_runner(model: Any, num_blocks: int, **sizes: Any) -> PlanRunner:
    """Builds the runner of a patched model, with ``num_blocks`` blocks."""
    servable = servable_model(model)
    assert servable is not None
    return PlanRunner(StepExecutor(servable, ExecutorSizes(num_blocks, **sizes)))


def submit(
    engine: LLMEngine, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> None:
    """Adds requests whose ids are the numbers of their prompts."""
    params_per_request = params if isinstance(params, list) else [params] * len(prompts)
    for number, (prompt, request_params) in enumerate(zip(prompts, params_per_request, strict=True)):
        engine.add_request(NewRequest(str(number), prompt, request_params))


def drain(engine: LLMEngine) -> list[RequestOutput]:
    """Runs the engine until it is idle; returns the last output of each request, in order of submission."""
    last: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            last[output.request_id] = output
    assert all(output.finished for output in last.values())
    return [last[name] for name in sorted(last, key=int)]


def generate_token_ids(
    engine: LLMEngine, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> list[list[list[int]]]:
    """Runs prompts; returns the output tokens of each sequence of each prompt."""
    submit(engine, prompts, params)
    return [[completion.token_ids for completion in output.outputs] for output in drain(engine)]
