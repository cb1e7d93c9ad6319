"""Fixtures of the checkpoint tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models import tiny
from torch_armllm import Recipe
from torch_armllm.quant.inplace import quantize


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A float checkpoint of two layers."""
    tiny("llama").save_pretrained(tmp_path / "float")
    return tmp_path / "float"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A quantized folder."""
    model = tiny("llama")
    quantize(model, Recipe(importance=False), progress=False)
    model.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"
