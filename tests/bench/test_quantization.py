"""The benches of quantizing a folder and of rounding activations."""

from __future__ import annotations

import math
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import activations, quantize_folder
from bench.quantize_folder import measure, random_texts
from tests.support.models import tiny, token_ids
from torch_armllm.quant.recipe import Recipe


@pytest.mark.parametrize("method", ["mse", "gptq"])
def test_time_and_memory_of_quantizing_a_folder_are_measured(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(perf_counter=iter([10.0, 12.5]).__next__, sleep=time.sleep)
    monkeypatch.setattr(quantize_folder, "time", clock)
    model = tiny("llama")
    model.save_pretrained(tmp_path / "float")
    texts = random_texts(4, model.config.vocab_size, 24) if method == "gptq" else None
    found = measure(tmp_path / "float", tmp_path / "out", Recipe(method=method), texts)
    layers = list(model.model.layers[0].parameters())
    assert found["largest_block_bytes"] == sum(p.nbytes for p in layers if p.dim() == 2)
    assert found["float_bytes"] == sum(f.stat().st_size for f in (tmp_path / "float").glob("*.safetensors"))
    assert 0 < found["written_bytes"] < found["float_bytes"]
    assert found["seconds"] == 2.5
    assert found["peak_bytes"] >= 0


def test_random_texts_are_the_same_each_time() -> None:
    texts = random_texts(3, 50, 8)
    assert texts.shape == (3, 8)
    assert int(texts.max()) < 50
    assert torch.equal(texts, random_texts(3, 50, 8))


def test_group_rounding_uses_the_peak_of_each_group() -> None:
    x = torch.cat([torch.full((1, 64), 0.3), torch.full((1, 64), 127.0)], dim=1)
    assert torch.equal(activations.rounded(x)[:, :64], torch.zeros(1, 64))
    torch.testing.assert_close(activations.rounded(x, 64), x)
    assert torch.equal(activations.rounded(x, 100), activations.rounded(x))  # no whole groups


def test_layer_cost_is_measured() -> None:
    x = torch.zeros(2, 128)
    x[0, 0], x[1] = 8.0, 1.0
    found = activations.cost(x, torch.eye(128))
    assert found.largest_peak == pytest.approx(math.sqrt(128))
    assert found.usual_peak in (pytest.approx(1.0), pytest.approx(math.sqrt(128)))
    assert found.error < 1e-6
    spiked = torch.randn(16, 128, generator=torch.Generator().manual_seed(0))
    spiked[:, 0] = 100.0
    found = activations.cost(spiked, torch.randn(8, 128, generator=torch.Generator().manual_seed(1)))
    assert found.grouped < found.error


def test_every_linear_layer_but_the_head_is_measured() -> None:
    model = tiny("llama")
    found = activations.measure(model, token_ids(1, 16))
    names = {n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
    assert set(found) == names
    assert all(0 < x.error < 0.05 and x.largest_peak >= x.usual_peak >= 1 for x in found.values())
    assert not any(m._forward_pre_hooks for m in model.modules())
