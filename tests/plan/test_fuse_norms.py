"""Fusion of norms with the linear layers after them."""

from __future__ import annotations

import pytest
import torch

from tests.support.models import tiny, token_ids
from torch_armllm import patch
from torch_armllm.plan import fuse_norms, program


def steps(family: str, monkeypatch: pytest.MonkeyPatch, fused: bool) -> tuple[list[str], torch.Tensor]:
    """The instructions of a patched model's plan, and its logits."""
    written: list[str] = []
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
def test_fused_norms_do_not_change_bits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    separate, expected = steps(family, monkeypatch, fused=False)
    merged, found = steps(family, monkeypatch, fused=True)
    assert torch.equal(found, expected)
    counts = {code: merged.count(code) for code in ("norm_linear", "norm_gated_linear")}
    if family == "llama":
        assert counts == {"norm_linear": 2, "norm_gated_linear": 2}
    assert len(separate) - len(merged) == sum(counts.values())


def test_norm_with_two_readers_is_not_fused() -> None:
    def norm_and_layer(readers: int) -> program.Program:
        p = program.Program()
        x, weight = p.allocate(8, torch.float32), p.constant(torch.ones(8))
        out = p.allocate(8, torch.float32)
        none = program.NOTHING
        norm = {"x": x, "out": out, "residual": none, "sum": none, "weight": weight, "bias": none}
        p.emit("rms_norm", **norm, rows_per_token=1, width=8, eps=1e-5, weight_offset=0.0)
        for _ in range(readers):
            y = p.allocate(8, torch.float32)
            layer = {"x": out, "out": y, "residual": none, "weight": weight, "bias": none}
            p.emit("linear", **layer, panel_stride=64, scheme="g32i", in_features=8, out_features=8)
        return p

    assert fuse_norms.fuse_norms(norm_and_layer(1)) == 1
    assert fuse_norms.fuse_norms(norm_and_layer(2)) == 0
