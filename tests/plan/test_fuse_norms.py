"""Fusion of norms with the linear layers after them."""

from __future__ import annotations

import pytest
import torch

from tests.support.models import tiny, token_ids
from torch_armllm import patch
from torch_armllm.plan import fuse_norms, program
from torch_armllm.plan.placed_program import Encoded, PlacedProgram


def opcodes_and_logits(
    family: str, monkeypatch: pytest.MonkeyPatch, fused: bool
) -> tuple[list[str], torch.Tensor]:
    """Returns the opcodes of a patched model's plan, and its logits, with or without fusion."""
    opcodes: list[str] = []
    encode = PlacedProgram.encode

    def record(self: PlacedProgram) -> Encoded:
        opcodes.extend(i.opcode for i in self.instructions)
        return encode(self)

    with monkeypatch.context() as patch_context:
        patch_context.setattr(PlacedProgram, "encode", record)
        if not fused:
            patch_context.setattr("torch_armllm.plan.lower.fuse_norms", lambda _: 0)
        model = tiny(family, torch.bfloat16)
        patch(model, progress=False)
        with torch.no_grad():
            logits = model(token_ids(1, 13)).logits
    return opcodes, logits


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_fused_norms_do_not_change_bits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opcodes_before, expected = opcodes_and_logits(family, monkeypatch, fused=False)
    fused_opcodes, actual = opcodes_and_logits(family, monkeypatch, fused=True)
    assert torch.equal(actual, expected)
    counts = {code: fused_opcodes.count(code) for code in ("norm_linear", "norm_gated_linear")}
    if family == "llama":
        assert counts == {"norm_linear": 2, "norm_gated_linear": 2}
    assert len(opcodes_before) - len(fused_opcodes) == sum(counts.values())


def test_norm_with_two_readers_is_not_fused() -> None:
    def norm_and_layers(readers: int) -> program.Program:
        plan = program.Program()
        x, weight = plan.allocate(8, torch.float32), plan.constant(torch.ones(8))
        out = plan.allocate(8, torch.float32)
        nothing = program.NOTHING
        norm = {"x": x, "out": out, "residual": nothing, "sum": nothing, "weight": weight, "bias": nothing}
        plan.emit("rms_norm", **norm, rows_per_token=1, width=8, eps=1e-5, weight_offset=0.0)
        for _ in range(readers):
            y = plan.allocate(8, torch.float32)
            layer = {"x": out, "out": y, "residual": nothing, "weight": weight, "bias": nothing}
            sizes = {"panel_stride": 64, "in_features": 8, "out_features": 8}
            plan.emit("linear", **layer, **sizes, scheme="g32i", digits=1, rotated=False)
        return plan

    assert fuse_norms.fuse_norms(norm_and_layers(1)) == 1
    assert fuse_norms.fuse_norms(norm_and_layers(2)) == 0
