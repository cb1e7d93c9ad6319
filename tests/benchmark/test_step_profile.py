"""The step profile: its arithmetic, and the profile of a small model."""

from __future__ import annotations

import pytest
import torch

import torch_armllm
from tests.support.models import tiny
from torch_armllm.benchmark.step_profile import StepPart, parts, profile, table


def test_times_of_equal_instructions_are_summed() -> None:
    rounds = torch.tensor(
        [
            [[1000, 1500, 0], [4000, 8000, 100], [3000, 3000, 200], [500, 0, 0], [600, 0, 0]],
            [[9000, 9500, 0], [4000, 8000, 100], [3000, 3000, 200], [500, 0, 0], [600, 0, 0]],
            [[1000, 1500, 0], [4000, 8000, 100], [3000, 3000, 200], [500, 0, 0], [600, 0, 0]],
        ]
    )
    found = parts(["linear", "attention", "linear"], rounds, threads=2)
    assert found == [
        StepPart("linear", 2, 4.0, 4.5 / 8),
        StepPart("attention", 1, 4.0, 1.0),
        StepPart("after the last", 0, 0.6, None),
        StepPart("before the first", 0, 0.5, None),
        StepPart("between instructions", 0, pytest.approx(0.3), None),
    ]
    assert "56%" in table(found)


def test_profile_of_a_small_model() -> None:
    model = tiny("llama")
    torch_armllm.patch(model, progress=False)
    for arguments in ({"batch_size": 2, "context": 5}, {"prompt": 9}):
        found = {part.name: part for part in profile(model, rounds=2, **arguments)}
        layers = model.config.num_hidden_layers
        assert found["attention"].count == layers
        assert found["attention"].microseconds > 0
        assert 0 < (found["linear"].working or 0) <= 1
        assert found["before the first"].working is None
