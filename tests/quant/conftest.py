"""What several tests of quantisation start from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.models import tiny


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Products of several threads may sum in another order where their operands lie elsewhere in memory."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A float checkpoint of two layers."""
    tiny("llama").save_pretrained(tmp_path / "float")
    return tmp_path / "float"
