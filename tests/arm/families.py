"""Families of different structures, step by step on this machine's kernels, compared with the originals.

For runs that name this file: `tests/model_survey` has these and all others.
"""

from __future__ import annotations

import pytest

from tests.support.parity import check_quantized, check_unquantized

FAMILIES = ["llama", "qwen3_moe", "gpt_oss", "deepseek_v2"]
"""Dense; routed experts; sinks, sliding windows and clamped experts; latent KV cache."""


@pytest.mark.parametrize("family", FAMILIES)
def test_unquantized_steps_equal_the_models(family: str) -> None:
    check_unquantized(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_quantized_steps_match_the_emulation(family: str) -> None:
    assert check_quantized(family).captured
