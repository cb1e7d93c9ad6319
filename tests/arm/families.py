"""Families of different structures, step by step on this machine's kernels, beside the models they were.

For runs that name this file: `tests/families` has these and all others.
"""

from __future__ import annotations

import pytest

from tests.parity import check_quantised, check_unquantised

FAMILIES = ["llama", "qwen3_moe", "gpt_oss", "deepseek_v2"]
"""Plain, with routed experts, with sinks and windows and experts that clamp, and with a cache of latents."""


@pytest.mark.parametrize("family", FAMILIES)
def test_unquantised_steps_are_the_models_own(family: str) -> None:
    check_unquantised(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_quantised_steps_are_those_of_the_emulation(family: str) -> None:
    assert check_quantised(family).captured
