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
from tests.support.exact_outputs import (
    GREEDY,
    OPTIONS,
    check_forked,
    check_preempted,
    exact_outputs,
    prompt,
    prompt_lengths,
    small_engine,
)
from tests.support.sparse_models import BLOCKS, sparse_model
from torch_armllm.engine.llm_engine import LLMEngine
from torch_armllm.ops import variants
from torch_armllm.patching.state import patched_forward

INT8 = "deepseek_v32 with int8 latents"
FAMILIES = ("deepseek_v32", INT8, "glm_moe_dsa", "dots3_note_text", BLOCKS)
EACH_KIND = ("deepseek_v32", INT8, BLOCKS)
"""Families whose indexers select single tokens, and blocks."""


@functools.cache
def model(family: str) -> Any:
    made = sparse_model(family.split()[0], torch.bfloat16)
    report = torch_armllm.patch(made, progress=False, kv_cache_dtype="int8" if family == INT8 else None)
    assert report.captured and not report.notes, report
    return made


def engine(family: str, **options: Any) -> LLMEngine:
    return small_engine(model(family), **options)


@functools.cache
def alone(family: str, length: int, seed: int) -> Any:
    return exact_outputs(engine(family), [prompt(length, seed)])[0]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(lengths=prompt_lengths(1, 2, 15, 16, 17, 31, 33, 90, 135), options=st.sampled_from(OPTIONS))
def test_batched_and_chunked_bits_equal_those_alone(
    family: str, lengths: list[int], options: dict[str, Any]
) -> None:
    prompts = [prompt(length, seed) for seed, length in enumerate(lengths)]
    found = exact_outputs(engine(family, **options), prompts)
    assert found == [alone(family, length, seed) for seed, length in enumerate(lengths)]


@pytest.mark.parametrize("family", ["deepseek_v32", INT8, "dots3_note_text", BLOCKS])
def test_preempted_bits_equal_those_alone(family: str) -> None:
    forward = patched_forward(model(family))
    assert forward is not None
    small = 5 * forward.shape.block_size * forward.shape.bytes_per_token
    check_preempted(functools.partial(engine, family), small)


@pytest.mark.parametrize("family", EACH_KIND)
def test_forked_sequences_equal_those_alone(family: str) -> None:
    check_forked(functools.partial(engine, family))


@pytest.mark.parametrize("family", EACH_KIND)
def test_cached_prefixes_keep_their_index_keys(family: str) -> None:
    running, shared = engine(family), prompt(70, 1)
    prompts = [shared + prompt(length, length) for length in (1, 20, 33)]
    expected = [exact_outputs(engine(family), [p])[0] for p in prompts]
    cached = []
    for number, each in enumerate(prompts):
        submit(running, [each], GREEDY)
        (output,) = drain(running)
        assert [(o.token_ids, o.logprobs) for o in output.outputs] == expected[number]
        cached.append(output.num_cached_tokens)
    assert cached == [0, 64, 64]


@pytest.mark.parametrize("family", EACH_KIND)
@pytest.mark.parametrize("variant", variants.machine().distinct("select", "block_select", "attention"))
def test_every_variant_returns_the_same_bits_in_any_batch(variant: str, family: str) -> None:
    prompts = [prompt(length, length) for length in (1, 33, 70)]
    with variants.use(variant):
        running = engine(family)
        together = exact_outputs(running, prompts)
        assert together == [exact_outputs(running, [p])[0] for p in prompts]


def test_int8_keys_and_values_stand_beside_index_keys_of_floats() -> None:
    made = sparse_model(BLOCKS, torch.bfloat16)
    report = torch_armllm.patch(made, progress=False, kv_cache_dtype="int8")
    assert not report.notes
    prompts = [prompt(length, length) for length in (3, 100, 33)]
    together = exact_outputs(small_engine(made), prompts)
    assert together == [exact_outputs(small_engine(made), [p])[0] for p in prompts]
