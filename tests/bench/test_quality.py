"""The comparison of quantization's accuracy cost: its start models and its divergence measure."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.gguf_writer import write_float
from bench.quality.divergence import Divergence
from bench.quality.starts import _halves, padded
from tests.support.models import tiny, token_ids
from torch_armllm.checkpoint.load import load_model


def test_zero_padding_does_not_change_logits() -> None:
    model, ids = tiny("llama"), token_ids(2, 24)
    model.tie_weights()
    wide = padded(model)
    assert wide.config.hidden_size == wide.config.intermediate_size == 256
    assert wide.model.layers[0].self_attn.o_proj.weight.shape == (256, 256)
    with torch.no_grad():
        torch.testing.assert_close(wide(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)


def test_float_gguf_file_round_trips(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the extra gguf")
    model = tiny("llama", tie_word_embeddings=True)
    write_float(tmp_path / "model.gguf", model)
    read = load_model(str(tmp_path / "model.gguf"), torch.float32, dequantize=True)
    ids = token_ids(2, 24)
    with torch.no_grad():
        torch.testing.assert_close(read(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-6)


def test_rotary_pairs_become_halves() -> None:
    rows = torch.arange(8.0).view(1, 8, 1)  # two heads of two pairs
    assert _halves(rows, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_divergence_perplexity_and_agreement() -> None:
    tokens = torch.tensor([0, 1, 1])
    wanted = torch.tensor([[0.0, 0.0]]).expand(3, 2)
    found = Divergence()
    found.add(wanted, wanted, tokens)
    assert found.kl == 0
    assert found.perplexity == pytest.approx(2)
    assert found.agreement == 1
    other = Divergence()
    other.add(wanted, _log([0.25, 0.75]), tokens)
    assert other.kl == pytest.approx(0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75))
    assert other.perplexity == pytest.approx(1 / 0.75)
    assert other.agreement == 0


def _log(chances: list[float]) -> Tensor:
    return torch.tensor([chances]).log().expand(3, 2)
