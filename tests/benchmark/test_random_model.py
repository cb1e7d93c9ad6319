from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

import torch_armllm  # noqa: F401  # its quantizer loads the folders
from torch_armllm.benchmark.random_model import save_random_model
from torch_armllm.quant.modules.experts import QuantExperts
from torch_armllm.quant.modules.linear import QuantLinear

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "dtype": "bfloat16",
}


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(torch.arange(3, 12)[None]).logits
    return found.float()


@pytest.mark.parametrize(
    ("scheme", "head", "tied"),
    [("g32iz", "int8", True), ("g32iz", "int8", False), ("int5", "int6", True), ("int3", "rowz", False)],
)
def test_dense_model_loads_packed_and_computes(tmp_path: Path, scheme: str, head: str, tied: bool) -> None:
    save_random_model(LlamaConfig(**SIZES, tie_word_embeddings=tied), tmp_path, scheme, head)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    linears = [m for m in model.modules() if isinstance(m, (nn.Linear, QuantLinear))]
    assert linears and all(isinstance(m, QuantLinear) for m in linears)
    assert model.hf_quantizer.report.capture_reason is None
    found = logits(model)
    assert bool(found.isfinite().all()) and 0.01 < float(found.std()) < 100


def test_tokens_spread_over_the_experts(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(**SIZES, moe_intermediate_size=48, num_experts=8, num_experts_per_tok=2)
    save_random_model(config, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert sum(isinstance(m, QuantExperts) for m in model.modules()) == 2
    router = model.get_submodule("model.layers.0.mlp.gate").weight.float()
    chosen = (torch.randn(512, 64) @ router.T).topk(2).indices.flatten().bincount(minlength=8)
    assert int(chosen.min()) > 0.3 * 512 * 2 / 8
    assert bool(logits(model).isfinite().all())


def test_complete_folder_is_reused_and_replaced_for_another_shape(tmp_path: Path) -> None:
    def config(layers: int) -> PreTrainedConfig:
        return LlamaConfig(**{**SIZES, "num_hidden_layers": layers})

    save_random_model(config(1), tmp_path)
    written = (tmp_path / "model-00001.safetensors").stat().st_mtime_ns
    save_random_model(config(1), tmp_path)
    assert (tmp_path / "model-00001.safetensors").stat().st_mtime_ns == written
    save_random_model(config(2), tmp_path)
    assert (tmp_path / "model-00001.safetensors").stat().st_mtime_ns != written


def test_schemes_without_a_generator_raise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="g32z"):
        save_random_model(LlamaConfig(**SIZES), tmp_path, scheme="g32z")


def test_files_hold_as_many_tensors_as_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 20_000
    monkeypatch.setattr("torch_armllm.benchmark.random_model._SHARD", most)
    save_random_model(LlamaConfig(**SIZES), tmp_path)
    files = [load_file(file) for file in sorted(tmp_path.glob("*.safetensors"))]
    sizes = [sum(tensor.nbytes for tensor in file.values()) for file in files]
    assert len(sizes) > 2
    assert all(size <= most or len(file) == 1 for size, file in zip(sizes, files, strict=True))
    assert all(size + following > most for size, following in itertools.pairwise(sizes))
