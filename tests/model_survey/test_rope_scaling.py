"""Capture of rotary frequencies that depend on the sequence length, below and above the original length."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_armllm
from torch_armllm.model_survey.tiny_models import tiny_ids, tiny_model

ORIGINAL = 32
_COMMON = {"rope_theta": 10000.0, "original_max_position_embeddings": ORIGINAL}
_LONG = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 6.0]}
_EIGHT = {name: [f for f in factors for _ in range(2)] for name, factors in _LONG.items()}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("llama", {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}),
    "dynamic": ("llama", {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}),
    "yarn": ("llama", {"rope_type": "yarn", "factor": 4.0, **_COMMON}),
    "llama3": (
        "llama",
        {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **_COMMON},
    ),
    "longrope": ("phi3", {"rope_type": "longrope", "factor": 4.0, **_EIGHT, **_COMMON}),
    "partial longrope": (
        "phi3",
        {"rope_type": "longrope", "factor": 4.0, "partial_rotary_factor": 0.5, **_LONG, **_COMMON},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_positions_beyond_the_original_length(kind: str) -> None:
    family, parameters = KINDS[kind]
    more = {"original_max_position_embeddings": ORIGINAL} if family == "phi3" else {}
    length = ORIGINAL if kind == "dynamic" else 4 * ORIGINAL
    options = {"rope_parameters": parameters, "max_position_embeddings": length, **more}
    model, own = (tiny_model(family, **options) for _ in range(2))
    report = torch_armllm.patch(model, None, progress=False)
    # frequencies that grow with the longest position are Python data: such a model keeps its own forward
    assert report.captured == (kind != "dynamic"), report.capture_reason
    for count in (12, 100, 12):
        ids = tiny_ids(1, count)
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, own(ids).logits, rtol=1e-3, atol=1e-3)
