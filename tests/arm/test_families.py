"""Families of different structures, step by step on this machine's kernels, beside the models they were."""

from __future__ import annotations

import pytest

import torch_armllm
from tests.parity import differences, expected, steps
from torch_armllm import quant
from torch_armllm.coverage.tiny import tiny_model
from torch_armllm.quant.reference import emulate

FAMILIES = ["llama", "qwen3_moe", "gpt_oss", "deepseek_v2"]
"""Plain, with routed experts, with sinks and windows and experts that clamp, and with a cache of latents."""


@pytest.mark.parametrize("family", FAMILIES)
def test_unquantised_steps_are_the_models_own(family: str) -> None:
    model = tiny_model(family)
    wanted = expected(model)
    report = torch_armllm.patch(model, None, progress=False)
    assert report.captured, report.capture_reason
    for name, (_, largest) in differences(steps(model), wanted).items():
        assert largest < 3e-4, name


@pytest.mark.parametrize("family", FAMILIES)
def test_quantised_steps_are_those_of_the_emulation(family: str) -> None:
    model, twin = tiny_model(family), tiny_model(family)
    quant.quantize(twin, progress=False, importance=False)
    wanted = expected(emulate(twin))
    report = torch_armllm.patch(model, importance=False, progress=False)
    assert report.captured, report.capture_reason
    # absorbed latent attention rounds queries and what is attended to, the emulation rounds the latents
    usual = 3e-2 if report.kv_bytes_expanded else 1e-3
    for name, (most, largest) in differences(steps(model), wanted).items():
        # rounding may carry an activation over to the next integer, and a token to another expert
        assert most < usual, name
        assert largest < 0.1, name
