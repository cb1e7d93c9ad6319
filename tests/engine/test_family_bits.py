"""Families with attention of their own, ALiBi, learned positions or caches of several kinds: the same bits
alone, batched, in chunks and preempted."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import torch_armllm
from tests.support.exact_outputs import exact_outputs, prompt, small_engine
from torch_armllm.engine.llm_engine import LLMEngine
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.model_survey.tiny_models import tiny_model
from torch_armllm.patching.state import patched_forward
from torch_armllm.plan.native import NativePlan

FAMILIES = (
    "gptj", "codegen", "gpt_neo", "gpt_neox", "bloom", "mpt", "xglm", "openai-gpt", "falcon", "falcon+alibi",
    "llama4_text", "phimoe", "gemma3n_text", "hy_v4", "longcat_flash",
    "big_bird", "doge", "bart", "pegasus",
)  # fmt: skip
OVERRIDES: dict[str, dict[str, Any]] = {
    "falcon+alibi": {"alibi": True},
    "llama4_text": {"attention_chunk_size": 128},  # plans attend within a chunk
    "hy_v4": {"index_topk": 128},
}
LENGTHS = (30, 60, 1, 90, 25)
"""Prompts shorter and longer than the windows of 16 tokens and the blocks of 32."""
PARAMS = SamplingParams(temperature=0.0, max_tokens=20, logprobs=1, ignore_eos=True)


@functools.cache
def model(family: str) -> Any:
    made = tiny_model(family.partition("+")[0], torch.bfloat16, **OVERRIDES.get(family, {}))
    report = torch_armllm.patch(made, progress=False)
    assert report.captured, report.capture_reason
    return made


def engine(family: str, **options: Any) -> LLMEngine:
    usual = {"max_num_seqs": 8, "max_model_len": 128, "max_num_batched_tokens": 512}
    return small_engine(model(family), **{**usual, **options})


def prompts() -> list[list[int]]:
    return [prompt(length, seed) for seed, length in enumerate(LENGTHS)]


@functools.cache
def alone(family: str) -> list[Any]:
    return [exact_outputs(engine(family), [each], PARAMS)[0] for each in prompts()]


@pytest.mark.parametrize("family", FAMILIES)
def test_batched_and_chunked_bits_equal_those_alone(family: str) -> None:
    forward = patched_forward(model(family))
    assert forward is not None and isinstance(forward.plan, NativePlan)
    assert len({tuple(tokens) for ((tokens, _),) in alone(family)}) > 1
    assert exact_outputs(engine(family), prompts(), PARAMS) == alone(family)
    assert exact_outputs(engine(family, max_num_batched_tokens=11), prompts(), PARAMS) == alone(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_preempted_bits_equal_those_alone(family: str) -> None:
    forward = patched_forward(model(family))
    assert forward is not None
    block = forward.shape.block_size * forward.shape.bytes_per_token
    for swap in (0, 4 * block):
        running = engine(family, kv_cache_memory=4 * block, swap_space=swap, enable_prefix_caching=False)
        assert exact_outputs(running, prompts(), PARAMS) == alone(family)
        assert running.scheduler.preemptions > 0
