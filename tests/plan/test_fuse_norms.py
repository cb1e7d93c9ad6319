"""Norms that go into the linear layers behind them."""

from __future__ import annotations

import pytest
import torch

from tests.support.models import tiny, token_ids
from torch_armllm import patch
from torch_armllm.plan import fuse_norms, program
from torch_armllm.plan.program import Opcode


def steps(family: str, monkeypatch: pytest.MonkeyPatch, fused: bool) -> tuple[list[Opcode], torch.Tensor]:
    """The instructions of a patched model's plan, and its logits."""
    written: list[Opcode] = []
    encode = program.Program.encode

    def record(self: program.Program) -> tuple[list[int], list[float]]:
        written.extend(i.opcode for i in self.instructions)
        return encode(self)

    with monkeypatch.context() as patches:
        patches.setattr(program.Program, "encode", record)
        if not fused:
            patches.setattr("torch_armllm.plan.lower.fuse_norms", lambda _: 0)
        model = tiny(family, torch.bfloat16)
        patch(model, progress=False)
        with torch.no_grad():
            logits = model(token_ids(1, 13)).logits
    return written, logits


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_fused_norms_give_the_same_bits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    apart, expected = steps(family, monkeypatch, fused=False)
    together, found = steps(family, monkeypatch, fused=True)
    assert torch.equal(found, expected)
    counts = {code: together.count(code) for code in (Opcode.NORM_LINEAR, Opcode.NORM_GATED_LINEAR)}
    if family == "llama":
        assert counts == {Opcode.NORM_LINEAR: 2, Opcode.NORM_GATED_LINEAR: 2}
    assert len(apart) - len(together) == sum(counts.values())


def test_a_norm_with_two_readers_stays() -> None:
    def norm_and_layer(readers: int) -> program.Program:
        p = program.Program()
        x, weight = p.allocate(8, torch.float32), p.constant(torch.ones(8))
        out = p.allocate(8, torch.float32)
        none = program.NOTHING
        p.emit(Opcode.RMS_NORM, x, out, none, none, weight, none, 1, 8, 1e-5, 0.0)
        for _ in range(readers):
            y = p.allocate(8, torch.float32)
            p.emit(Opcode.LINEAR, out, y, none, weight, none, 64, 0, 8, 8)
        return p

    assert fuse_norms.fuse_norms(norm_and_layer(1)) == 1
    assert fuse_norms.fuse_norms(norm_and_layer(2)) == 0
