"""Models that attend to selected tokens: the same bits alone, batched, in chunks, preempted and forked."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torch_armllm
from tests.support.engines import drain, submit
from tests.support.sparse_models import sparse_model
from torch_armllm.engine.build import build_engine
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.llm_engine import LLMEngine
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.model_survey.tiny_models import tiny_ids
from torch_armllm.ops import variants
from torch_armllm.patching.state import patched_forward

FAMILIES = ("deepseek_v32", "glm_moe_dsa")
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, logprobs=1, ignore_eos=True)


@functools.cache
def model(family: str) -> Any:
    made = sparse_model(family, torch.bfloat16)
    report = torch_armllm.patch(made, progress=False)
    assert report.captured and not report.notes, report
    return made


def engine(family: str, **options: Any) -> LLMEngine:
    defaults = {"kv_cache_memory": 4 << 20, "max_num_seqs": 16, "max_num_batched_tokens": 64}
    return build_engine(model(family), None, EngineConfig(**{**defaults, **options}))


def sequences(running: LLMEngine, prompts: list[list[int]], params: Any) -> list[Any]:
    """Returns tokens and their exact log-probabilities; checks that all memory is free again."""
    submit(running, prompts, params)
    outputs = drain(running)
    blocks = running.scheduler.blocks
    assert blocks.free == blocks.num_blocks and blocks.swap.free == blocks.swap_blocks
    return [[(o.token_ids, o.logprobs) for o in output.outputs] for output in outputs]


def prompt(length: int, seed: int) -> list[int]:
    ids: list[int] = tiny_ids(1, length, seed)[0].tolist()
    return ids


@functools.cache
def alone(family: str, length: int, seed: int) -> Any:
    return sequences(engine(family), [prompt(length, seed)], GREEDY)[0]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    lengths=st.lists(st.sampled_from((1, 2, 15, 16, 17, 31, 33, 90)), min_size=1, max_size=7),
    options=st.sampled_from(
        (
            {},
            {"max_num_seqs": 2},
            {"max_num_batched_tokens": 16},
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 512, "max_model_len": 512},
        )
    ),
)
def test_batched_and_chunked_bits_equal_those_alone(
    family: str, lengths: list[int], options: dict[str, Any]
) -> None:
    prompts = [prompt(length, seed) for seed, length in enumerate(lengths)]
    found = sequences(engine(family, **options), prompts, GREEDY)
    assert found == [alone(family, length, seed) for seed, length in enumerate(lengths)]


@pytest.mark.parametrize("swap", [0, 1 << 20], ids=["recomputed", "swapped"])
def test_preempted_bits_equal_those_alone(swap: int) -> None:
    lengths = [28, 61, 29, 30, 31, 60]  # soon each needs one more block
    forward = patched_forward(model("deepseek_v32"))
    assert forward is not None
    small = 5 * forward.shape.block_size * forward.shape.bytes_per_token
    options = {"kv_cache_memory": small, "max_num_seqs": 3, "swap_space": swap, "max_model_len": 101}
    running = engine("deepseek_v32", **options)
    params = SamplingParams(temperature=0.0, max_tokens=40, logprobs=1, ignore_eos=True)
    prompts = [prompt(length, seed) for seed, length in enumerate(lengths)]
    expected = [sequences(engine("deepseek_v32"), [p], params)[0] for p in prompts]
    assert sequences(running, prompts, params) == expected
    assert running.scheduler.preemptions > 0


def test_forked_sequences_equal_those_alone() -> None:
    params = [
        SamplingParams(n=n, temperature=1.0, seed=n, max_tokens=10, logprobs=1, ignore_eos=True)
        for n in (1, 4, 3)
    ]
    prompts = [prompt(length, length) for length in (5, 40, 17)]
    together = sequences(engine("deepseek_v32"), prompts, params)
    assert len({tuple(tokens) for tokens, _ in together[1]}) > 1
    for number, each in enumerate(params):
        assert sequences(engine("deepseek_v32"), [prompts[number]], each)[0] == together[number]


def test_cached_prefixes_keep_their_index_keys() -> None:
    running, shared = engine("deepseek_v32"), prompt(70, 1)
    prompts = [shared + prompt(length, length) for length in (1, 20, 33)]
    expected = [sequences(engine("deepseek_v32"), [p], GREEDY)[0] for p in prompts]
    cached = []
    for number, each in enumerate(prompts):
        submit(running, [each], GREEDY)
        (output,) = drain(running)
        assert [(o.token_ids, o.logprobs) for o in output.outputs] == expected[number]
        cached.append(output.num_cached_tokens)
    assert cached == [0, 64, 64]


@pytest.mark.parametrize("variant", variants.machine().distinct("select", "attention"))
def test_every_variant_returns_the_same_bits_in_any_batch(variant: str) -> None:
    prompts = [prompt(length, length) for length in (1, 33, 70)]
    with variants.use(variant):
        running = engine("deepseek_v32")
        together = sequences(running, prompts, GREEDY)
        assert together == [sequences(running, [p], GREEDY)[0] for p in prompts]
