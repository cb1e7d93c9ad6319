"""Files of tensors on a disk that is full."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from torch_armllm.system.tensor_files import save_tensors


@contextmanager
def full_disk(most_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("most_bytes", [0, 100, 726, 1200])
def test_full_disk_raises_oserror_and_leaves_the_old_file(most_bytes: int, tmp_path: Path) -> None:
    file = tmp_path / "state.pt"
    save_tensors({"x": torch.arange(4)}, file)
    with full_disk(most_bytes), pytest.raises(OSError, match="File too large"):
        save_tensors({"x": torch.randn(1000)}, file)
    assert torch.equal(torch.load(file)["x"], torch.arange(4))
    assert list(tmp_path.iterdir()) == [file]


def test_values_that_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="pickle"):
        save_tensors({"x": lambda: None}, tmp_path / "state.pt")
    assert not list(tmp_path.iterdir())
