"""Peers that quantize a PyTorch model in memory."""

from __future__ import annotations

import sys

import pytest
import torch

from bench import quality_peers
from bench.case import run
from bench.quality.comparison import Comparison
from bench.quality.torch_peers import torch_peers
from tests.support.models import tiny, token_ids


@pytest.mark.parametrize(("name", "group"), [("torchao", 32), ("torchao-hqq", 32), ("hqq", 64)])
def test_weights_have_sixteen_values_a_group(name: str, group: int) -> None:
    pytest.importorskip(name.partition("-")[0], reason="needs the peer's package")
    model, other = tiny("llama", tie_word_embeddings=True), tiny("llama", tie_word_embeddings=True)
    (peer,) = torch_peers(name)
    assert peer.apply(model) == pytest.approx(4.5)
    for layer in (model.model.layers[0].self_attn.o_proj, model.model.layers[1].mlp.down_proj):
        weight = layer.weight
        floats = weight if name == "hqq" else weight.dequantize()
        for values in floats.float().reshape(-1, group)[:20]:
            assert len(values.unique()) <= 16
    assert torch.equal(model.lm_head.weight, other.lm_head.weight)


def test_torchao_rows_are_measured() -> None:
    pytest.importorskip("torchao", reason="needs torchao")
    model = tiny("llama", tie_word_embeddings=True)
    before = model.model.layers[0].mlp.up_proj.weight.clone()
    comparison = Comparison("tiny", model, token_ids(3, 24), token_ids(2, 24))
    for peer in torch_peers("torchao,torchao-hqq"):
        comparison.torch_peer(peer)
    _, affine, hqq = comparison.results.rows
    assert affine.kl.value > 0 and hqq.kl.value > 0 and affine.kl != hqq.kl
    assert affine.bits == 4.5 and affine.series == "torchao"
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, before)


@pytest.mark.parametrize(
    ("text", "message"),
    [("torchao,other", "'other' is no peer; use some of torchao"), ("hqq", "pip install hqq")],
)
def test_unknown_and_missing_peers_are_refused(
    text: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "hqq", None)  # importing it fails
    monkeypatch.setitem(sys.modules, "torchao", torch)
    with pytest.raises(ValueError, match=message):
        torch_peers(text)
    with pytest.raises(SystemExit):
        run(quality_peers.quality_peers, ["--peers", text])
    assert "argument --peers: " in capsys.readouterr().err
