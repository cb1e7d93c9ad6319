"""Tests of rotations by a table of cosines and sines."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torch_armllm.ops.rope import reference_rope
from torch_armllm.passes.lib.rope_tables import read_table

COUNT, SIZE = 40, 12
SAMPLED = torch.tensor([0, 1, 2, 3, 7, 33])


def table(pairs: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(COUNT)[:, None] / 50.0 ** (torch.arange(pairs) / pairs)
    return angles.cos(), angles.sin()


def heads() -> Tensor:
    return torch.randn(1, len(SAMPLED), 3, SIZE, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [2, 6])
def test_table_is_read_exactly(pairs: int, interleaved: bool) -> None:
    cos, sin = table(pairs)

    def rotate(x: Tensor, positions: Tensor) -> Tensor:
        return reference_rope(x, cos[positions], sin[positions], interleaved)

    found = read_table(rotate, heads(), SAMPLED, COUNT)
    assert found is not None
    assert found.interleaved == interleaved
    assert torch.equal(found.cos, cos)
    assert torch.equal(found.sin, sin)
    assert found == read_table(rotate, heads(), SAMPLED, COUNT)
    other = read_table(lambda x, p: reference_rope(x, sin[p], cos[p], interleaved), heads(), SAMPLED, COUNT)
    assert found != other


@pytest.mark.parametrize("kind", ["nothing", "added", "by head"])
def test_other_functions_of_positions_are_no_rotation(kind: str) -> None:
    cos, sin = table(6)

    def change(x: Tensor, positions: Tensor) -> Tensor:
        if kind == "nothing":
            return x
        if kind == "added":
            return x + cos[positions].repeat(1, 2)[None, :, None]
        return torch.cat([reference_rope(x[:, :, :1], cos[positions], sin[positions], False), x[:, :, 1:]], 2)

    assert read_table(change, heads(), SAMPLED, COUNT) is None
