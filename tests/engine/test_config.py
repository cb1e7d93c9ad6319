"""Tests of the checks of engine settings."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from torch_armllm.engine.config import EngineConfig

_WRONG_TYPES = ["64", [1], True, 1.5, -1, {"a": 1}]
_NAMES = [field.name for field in dataclasses.fields(EngineConfig) if field.name != "kv_cache_dtype"]


def _error(**settings: Any) -> str | None:
    try:
        EngineConfig(**settings)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", _NAMES)
def test_wrong_types_are_refused_by_name(name: str) -> None:
    errors = {str(value): _error(**{name: value}) for value in _WRONG_TYPES}
    refused = {value: error for value, error in errors.items() if error is not None}
    assert len(refused) > len(errors) / 2
    assert [value for value, error in refused.items() if name not in error or value not in error] == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_model_len", 1 << 27),
        ("threads", 1025),
        ("swap_space", -1),
        ("promised_memory", 1 << 51),
        ("max_step_time", float("nan")),
        ("kv_cache_memory", float("inf")),
    ],
)
def test_values_out_of_bounds_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name} = .*: give "):
        EngineConfig(**{name: value})


@pytest.mark.parametrize("value", ["auto", "float16", "int8", torch.bfloat16, None])
def test_other_state_dtypes_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"state_dtype = .*: give float32 or bfloat16"):
        EngineConfig(state_dtype=value)


def test_integers_of_numpy_are_taken() -> None:
    assert EngineConfig(max_model_len=np.int64(64)).max_model_len == 64
