"""Fixtures of the checkpoint tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models import tiny


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A float checkpoint of two layers."""
    tiny("llama").save_pretrained(tmp_path / "float")
    return tmp_path / "float"
