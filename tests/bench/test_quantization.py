"""The bench of quantizing a folder."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import quantize_folder
from bench.quantize_folder import measure, random_texts
from tests.support.models import tiny
from torch_armllm.quant.recipe import Recipe


@pytest.mark.parametrize("method", ["mse", "gptq"])
def test_time_and_memory_of_quantizing_a_folder_are_measured(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(perf_counter=iter([10.0, 12.5]).__next__)
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
