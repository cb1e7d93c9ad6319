"""Noise of at most one step, reproducible."""

from __future__ import annotations

import torch

from tests.support.models import tiny
from torch_armllm.evaluation.off_grid import move_off_grid


def test_weights_move_by_half_a_step_at_most() -> None:
    before, after = tiny("llama").state_dict(), tiny("llama")
    move_off_grid(after)
    again = tiny("llama")
    move_off_grid(again)
    moved = []
    for name, weight in after.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
        if "proj" in name:
            step = before[name].unflatten(1, (-1, 32)).abs().amax(2, keepdim=True) / 7
            part = (weight - before[name]).unflatten(1, (-1, 32)) / step
            moved.append(part.flatten())
        else:
            assert torch.equal(weight, before[name])
    whole = torch.cat(moved)
    assert whole.abs().max() <= 0.5 + 1e-4 and abs(whole.std() - 12**-0.5) < 0.01
