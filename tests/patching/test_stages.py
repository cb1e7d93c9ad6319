"""Stages of a pipeline: parts of a model's graph, beside the plan of the whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from tests.support.looped_models import looped
from tests.support.models import tiny
from torch_armllm.capture.export import CaptureError
from torch_armllm.hf.model_kind import kind_of
from torch_armllm.model_survey.tiny_models import tiny_model
from torch_armllm.parallel.stage import Stage
from torch_armllm.patching.build_plan import build_plan
from torch_armllm.plan.native import NativePlan
from torch_armllm.plan.sample_steps import sample_hidden
from torch_armllm.quant.inplace import quantize
from torch_armllm.quant.recipe import Recipe

CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama": ("llama", 2, {"attention_bias": True, "mlp_bias": True}),
    "four stages": ("llama", 4, {"num_hidden_layers": 5}),
    "windows": ("gemma3_text", 2, {}),
    "experts": ("qwen3_moe", 2, {}),
    "positions in a table": ("gpt2", 2, {}),
}
SURVEYED = {
    "deepseek_v3": 2,
    "deepseek_v32": 2,
    "kimi_linear": 2,
    "nemotron_h": 2,
    "granitemoehybrid": 2,
    "qwen3_5_moe_text": 2,
    "lfm2": 2,
    "jamba": 2,
    "falcon_mamba": 2,
}


def keeping(opcodes: Iterable[str]) -> int:
    """Returns the number of instructions that keep something of a sequence."""
    return sum("attention" in code or "rule" in code or "scan" in code for code in opcodes)


def check_stages(model: Any, count: int) -> None:
    """Compares the stages of a quantized model, one after another, with the plan of the whole."""
    quantize(model, Recipe(importance=False), progress=False)
    ids = torch.randint(3, 90, (1, 23), generator=torch.Generator().manual_seed(2))
    positions = torch.arange(23)[None]
    whole = build_plan(kind_of(model), True, None)
    assert isinstance(whole.plan, NativePlan), whole.notes
    expected = sample_hidden(whole.plan, whole.shape, ids, positions)
    given, layers, token_bytes, state_bytes, weights = None, 0, 0, 0, []
    for number in range(count):
        part = build_plan(kind_of(model), True, None, stage=Stage(number, count))
        assert isinstance(part.plan, NativePlan) and not part.notes, part.notes
        program = part.plan.program
        rows = sample_hidden(part.plan, part.shape, ids, positions, given)
        given = rows.to(program.dtype)
        layers += keeping(program.opcodes)
        token_bytes += part.shape.bytes_per_token
        state_bytes += part.shape.states.bytes_per_sequence
        weights.append(sum(c.nbytes for c in program.constants if c.dtype == torch.uint8))
    assert torch.equal(given.float(), expected)
    assert layers == keeping(whole.plan.opcodes)
    assert token_bytes == whole.shape.bytes_per_token
    assert state_bytes == whole.shape.states.bytes_per_sequence
    all_weights = sum(c.nbytes for c in whole.plan.program.constants if c.dtype == torch.uint8)
    assert all(0 < each < all_weights for each in weights)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in CASES), ("llama", torch.bfloat16), ("windows", torch.bfloat16)],
)
def test_stages_have_the_bits_of_the_whole(name: str, dtype: torch.dtype) -> None:
    family, count, settings = CASES[name]
    check_stages(tiny(family, dtype, **settings), count)


@torch.no_grad()
def test_layers_that_run_several_times_are_in_one_stage() -> None:
    check_stages(looped("dory"), 2)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(CaptureError, match="its layers cannot be shared out among 4 stages"):
        build_plan(kind_of(tiny("llama")), False, None, stage=Stage(0, 4))


@torch.no_grad()
@pytest.mark.parametrize("family", SURVEYED)
def test_stages_keep_their_own_latents_and_states(family: str) -> None:
    check_stages(tiny_model(family), SURVEYED[family])
