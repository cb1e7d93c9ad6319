"""Models with recurrent layers: the same bits alone, batched, in chunks, preempted, swapped and forked."""

from __future__ import annotations

import functools
import logging
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
from torch_armllm.engine.llm_engine import LLMEngine
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.kv_cache.dtype_names import StateDtype
from torch_armllm.kv_cache.dtypes import STATE_DTYPES
from torch_armllm.kv_cache.shapes import with_state_dtype
from torch_armllm.model_survey.tiny_models import tiny_model
from torch_armllm.ops import variants
from torch_armllm.patching.state import patched_forward
from torch_armllm.plan.native import NativePlan

FAMILIES = (
    "qwen3_5_moe_text",
    "kimi_linear",
    "nemotron_h",
    "lfm2",
    "mamba",
    "mamba2",
    "falcon_mamba",
    "jamba",
    "minimax",
    "recurrent_gemma",
    "inkling_text",
    "zamba",
    "qwen3_5_moe_text, bfloat16 states",
    "kimi_linear, bfloat16 states",
    "kimi_linear, int8 latents",
    "minimax, bfloat16 states",
    "jamba, bfloat16 states",
    "recurrent_gemma, bfloat16 states",
)


@functools.cache
def _model(family: str, cache_dtype: str | None) -> Any:
    made = tiny_model(family, torch.bfloat16)
    report = torch_armllm.patch(made, progress=False, kv_cache_dtype=cache_dtype)
    assert report.captured and not report.notes, report
    return made


def model(family: str) -> Any:
    """Returns the patched model of a family, whatever is said of its states."""
    return _model(family.split(",")[0], "int8" if family.endswith("int8 latents") else None)


def state_dtype(family: str) -> StateDtype:
    return "bfloat16" if family.endswith("bfloat16 states") else "float32"


def engine(family: str, **options: Any) -> LLMEngine:
    return small_engine(model(family), **{"state_dtype": state_dtype(family), **options})


def memory_of(family: str, blocks: int, slots: int) -> int:
    """Returns bytes for a few blocks and slots."""
    forward = patched_forward(model(family))
    assert forward is not None
    shape = with_state_dtype(forward.shape, STATE_DTYPES[state_dtype(family)])
    states = slots * shape.states.bytes_per_sequence
    return max(2 * states, states + blocks * shape.block_size * shape.bytes_per_token)


@functools.cache
def alone(family: str, length: int, seed: int) -> Any:
    return exact_outputs(engine(family), [prompt(length, seed)])[0]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(lengths=prompt_lengths(1, 2, 3, 31, 32, 33, 64, 90), options=st.sampled_from(OPTIONS))
def test_batched_and_chunked_bits_equal_those_alone(
    family: str, lengths: list[int], options: dict[str, Any]
) -> None:
    prompts = [prompt(length, seed) for seed, length in enumerate(lengths)]
    running = engine(family, **options)
    found = exact_outputs(running, prompts)
    assert running.scheduler.blocks.states is not None
    assert found == [alone(family, length, seed) for seed, length in enumerate(lengths)]


@pytest.mark.parametrize(
    "family", [f for f in FAMILIES if not any(kind in f for kind in ("mamba", "int8", "zamba"))]
)  # models without attention need no blocks, and memory for the states holds all keys of the others
def test_preempted_bits_equal_those_alone(family: str) -> None:
    check_preempted(functools.partial(engine, family), memory_of(family, blocks=5, slots=3))


@pytest.mark.parametrize("family", FAMILIES)
def test_forked_sequences_have_states_of_their_own(family: str) -> None:
    check_forked(functools.partial(engine, family))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_variant_returns_the_same_bits_in_any_batch(family: str) -> None:
    lengths = (1, 33, 70)
    prompts = [prompt(length, length) for length in lengths]
    for variant in variants.machine().distinct("recurrent"):
        with variants.use(variant):
            running = engine(family)
            together = exact_outputs(running, prompts)
            assert together == [exact_outputs(engine(family), [p])[0] for p in prompts]


def test_aborted_requests_free_their_slots() -> None:
    running = engine("lfm2", max_num_seqs=2)
    submit(running, [prompt(9, seed) for seed in range(6)], GREEDY)
    running.step()
    running.step()
    for number in range(5):
        running.abort_request(str(number))
    drain(running)
    states = running.scheduler.blocks.states
    assert states is not None and states.free == len(states) and not states.saved


def test_waiting_requests_are_served_by_few_slots() -> None:
    running = engine("lfm2", max_num_seqs=2)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    submit(running, [prompt(1 + seed % 3, seed) for seed in range(300)], params)
    assert len(drain(running)) == 300


def test_bfloat16_states_take_half_the_memory(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "torch_armllm"):
        wide, narrow = (
            engine(f"falcon_mamba{states}", kv_cache_memory=1 << 20, max_num_seqs=64)
            for states in ("", ", bfloat16 states")
        )
    assert " each, float32)" in caplog.text and " each, bfloat16)" in caplog.text
    dtypes = [{state.dtype for state in running.runner.executor.caches.states} for running in (wide, narrow)]  # type: ignore[union-attr]
    assert dtypes == [{torch.bfloat16, torch.float32}, {torch.bfloat16}]  # bfloat16 inputs of convolutions
    slots = [len(running.scheduler.blocks.states) for running in (wide, narrow)]  # type: ignore[arg-type]
    shape = model("falcon_mamba").base_model.forward.shape.states
    short = sum(group.bytes_per_sequence for group in shape.groups if not group.accumulates)
    assert 0 < short < shape.bytes_per_sequence / 2
    sizes = [shape.bytes_per_sequence, short + (shape.bytes_per_sequence - short) // 2]
    assert [(1 << 20) // size for size in sizes] == slots
    text = prompt(90, 1)
    assert exact_outputs(wide, [text]) != exact_outputs(narrow, [text]), "states are not rounded"


@pytest.mark.parametrize("family", ["llama", "lfm2", "mamba2"])
def test_state_dtype_without_effect_is_said(family: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "torch_armllm"):
        running = engine(family, state_dtype="bfloat16")
    said = {
        "llama": "state_dtype = bfloat16 has no effect, as it has no recurrent layers",
        "lfm2": "state_dtype = bfloat16 has no effect, as its recurrent layers are convolutions",
    }.get(family)
    assert ("state_dtype" in caplog.text) == (said is not None) and (said or "") in caplog.text
    assert len(exact_outputs(running, [prompt(9, 1)])) == 1 if family != "llama" else True


def test_engine_says_what_it_cannot_do(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "torch_armllm"):
        engine("lfm2", max_num_seqs=3)
    assert "for 3 sequences and 16 checkpoints" in caplog.text
    assert isinstance(model("lfm2").base_model.forward.plan, NativePlan)
    one = memory_of("qwen3_5_moe_text", blocks=3, slots=1)
    with caplog.at_level(logging.WARNING, "torch_armllm"):
        small = engine("qwen3_5_moe_text", kv_cache_memory=one, max_model_len=64)
    assert "no room for checkpoints of their states: prompts do not share" in caplog.text
    assert small.scheduler.blocks.prefix_cache is None
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    with pytest.raises(
        ValueError, match="keeps their states before each draft token, for which kv_cache_mem"
    ):
        engine("qwen3_5_moe_text", kv_cache_memory=one, max_model_len=64, speculative_config=drafts)
