"""Fixtures of the checkpoint tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.models import tiny
from torch_armllm import Recipe
from torch_armllm.quant.inplace import quantize


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders that tests get copies of."""
    folder = tmp_path_factory.mktemp("folders")
    model = tiny("llama")
    model.save_pretrained(folder / "float")
    quantize(model, Recipe(importance=False), progress=False)
    model.save_pretrained(folder / "saved")
    return folder


@pytest.fixture
def source(folders: Path, tmp_path: Path) -> Path:
    """A float checkpoint of two layers."""
    return shutil.copytree(folders / "float", tmp_path / "float")


@pytest.fixture
def saved(folders: Path, tmp_path: Path) -> Path:
    """The same, quantized."""
    return shutil.copytree(folders / "saved", tmp_path / "saved")
