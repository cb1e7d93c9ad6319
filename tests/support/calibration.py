"""Calibration tokens, and runs from folder to folder: their tensors, and interruptions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from torch_armllm.checkpoint.block_reader import BlockReader

CALIBRATION = torch.randint(97, (6, 32), generator=torch.Generator().manual_seed(3))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found.update(load_file(file))
    return found


def same_tensors(one: Path, other: Path) -> bool:
    """True if two folders hold the same tensors, bit for bit."""
    ours, theirs = tensors(one), tensors(other)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


@contextmanager
def interrupted_at(block: str) -> Iterator[None]:
    """Interrupts a run from folder to folder when it reads a block."""
    load = BlockReader.load

    def interrupted(self: BlockReader, name: str) -> None:
        if name == block:
            raise KeyboardInterrupt
        load(self, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockReader, "load", interrupted)
        with pytest.raises(KeyboardInterrupt):
            yield
