"""Tests of models that multiply the queries of later positions, so that their attention stays sharp."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from torch_armllm import patch
from torch_armllm.hf.cache_names import cache_of, usual_name
from torch_armllm.model_survey.tiny_models import build_tiny, tiny_config, tiny_ids
from torch_armllm.patching.state import patch_state

_TOLERANCE = 0.05
"""Latent attention rounds its projections to INT8 anew."""


@pytest.mark.parametrize(
    ("family", "auto"), [("ministral3", AutoModelForCausalLM), ("mistral4", AutoModelForImageTextToText)]
)
@pytest.mark.parametrize("unscaled", [16, 4096])
def test_queries_of_later_positions_are_scaled(family: str, auto: Any, unscaled: int) -> None:
    """With 4096 positions that are not scaled, a look at the first few hundred says nothing."""
    own = tiny_config(family).rope_parameters
    rope = {**own, "original_max_position_embeddings": unscaled, "llama_4_scaling_beta": 0.8}
    config = tiny_config(family, rope_parameters=rope, max_position_embeddings=40_000)
    model = build_tiny(auto, config)
    ids = tiny_ids(1, 40)
    positions = torch.arange(40)[None] + (0 if unscaled == 16 else 30_000)
    report = patch(model, "int8", progress=False)
    assert report.captured and not [note for note in report.notes if "node by node" in note], report
    with torch.no_grad():
        with patch_state(model).forward.by_modules("they are compared with"):
            expected = model(input_ids=ids, position_ids=positions).logits
            other = model(input_ids=ids, position_ids=positions % 16).logits
        prompt = model(input_ids=ids[:, :37], position_ids=positions[:, :37], use_cache=True)
        rest = {"position_ids": positions[:, 37:], usual_name(): cache_of(prompt)}
        found = torch.cat([prompt.logits, model(input_ids=ids[:, 37:], **rest).logits], 1)
    assert _error(found, expected) < _TOLERANCE < _error(other, expected) / 3


def _error(found: Tensor, expected: Tensor) -> float:
    """Returns the median of the tokens' relative errors: rounding may send single ones to other experts."""
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    return float(errors.median())
