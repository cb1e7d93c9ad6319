"""Models that attend to compressed entries: the same bits alone, batched, in chunks, preempted and forked."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import torch_armllm
from tests.support.compressed_models import compressed_model
from tests.support.engines import drain, submit
from tests.support.exact_outputs import (
    GREEDY,
    OPTIONS,
    check_forked,
    check_preempted,
    exact_outputs,
    prompt,
    small_engine,
)
from torch_armllm.engine.llm_engine import LLMEngine
from torch_armllm.ops import variants
from torch_armllm.patching.state import patched_forward

LENGTHS = (1, 3, 31, 39, 41, 90, 135)


@functools.cache
def model() -> Any:
    made = compressed_model(torch.bfloat16)
    report = torch_armllm.patch(made, progress=False)
    assert report.captured and not report.notes, report
    return made


def engine(**options: Any) -> LLMEngine:
    return small_engine(model(), **options)


@functools.cache
def alone(length: int) -> Any:
    return exact_outputs(engine(), [prompt(length, length)])[0]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_batched_and_chunked_bits_equal_those_alone(options: dict[str, Any]) -> None:
    found = exact_outputs(engine(**options), [prompt(length, length) for length in LENGTHS])
    assert found == [alone(length) for length in LENGTHS]


def test_preempted_bits_equal_those_alone() -> None:
    forward = patched_forward(model())
    assert forward is not None
    shape = forward.shape
    states = 3 * shape.states.bytes_per_sequence
    check_preempted(engine, max(2 * states, states + 5 * shape.block_size * shape.bytes_per_token))


def test_forked_sequences_equal_those_alone() -> None:
    check_forked(engine)


def test_cached_prefixes_keep_their_entries() -> None:
    running, shared = engine(), prompt(70, 1)
    prompts = [shared + prompt(length, length) for length in (1, 20, 33)]
    cached = []
    for each in prompts:
        submit(running, [each], GREEDY)
        (output,) = drain(running)
        (expected,) = exact_outputs(engine(), [each])
        assert [(o.token_ids, o.logprobs) for o in output.outputs] == expected
        cached.append(output.num_cached_tokens)
    assert cached[0] == 0 and cached[2] == 64


@pytest.mark.parametrize("variant", variants.machine().distinct("compress", "select", "attention"))
def test_every_variant_returns_the_same_bits_in_any_batch(variant: str) -> None:
    prompts = [prompt(length, length) for length in (1, 33, 70)]
    with variants.use(variant):
        running = engine()
        together = exact_outputs(running, prompts)
        assert together == [exact_outputs(running, [p])[0] for p in prompts]
