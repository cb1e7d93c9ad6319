"""An engine over layers that run several times: the same bits batched, in chunks, cached and preempted."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import torch_armllm
from tests.support.exact_outputs import (
    OPTIONS,
    check_forked,
    check_preempted,
    exact_outputs,
    prompt,
    small_engine,
)
from tests.support.looped_models import looped
from torch_armllm.patching.state import patched_forward

KINDS = {"dory": torch.bfloat16, "code": torch.float32}


@functools.cache
def model(kind: str) -> Any:
    made = looped(kind, KINDS[kind])
    report = torch_armllm.patch(made, progress=False)
    assert report.captured and not report.notes, report
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_batched_chunked_and_cached_bits_equal_those_alone(kind: str) -> None:
    prompts = [prompt(length, length) for length in (1, 33, 90, 64)]
    alone = [exact_outputs(small_engine(model(kind)), [each])[0] for each in prompts]
    for options in OPTIONS:
        assert exact_outputs(small_engine(model(kind), **options), prompts) == alone
    running = small_engine(model(kind))
    for _ in range(2):
        assert exact_outputs(running, prompts) == alone
    assert running.scheduler.blocks.hit_rate > 0


@pytest.mark.parametrize("kind", KINDS)
def test_preempted_and_forked_bits_equal_those_alone(kind: str) -> None:
    forward = patched_forward(model(kind))
    assert forward is not None
    shape = forward.shape
    make = functools.partial(small_engine, model(kind))
    check_preempted(make, 5 * shape.block_size * shape.bytes_per_token)
    check_forked(make)
