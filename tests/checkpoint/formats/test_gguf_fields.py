"""Fields and tensors of GGUF files that change what a model computes: read, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.checkpoint.formats.test_gguf_architectures import COMMON
from tests.support.format_results import relative
from tests.support.gguf_models import write_model
from tests.support.models import token_ids
from torch_armllm import Recipe, load
from torch_armllm.checkpoint.load import load_model
from torch_armllm.engine.text.stopping import find_eos_token_ids

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.4, 1.5, 2.0, 2.5, 3.0],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0],
    "original_max_position_embeddings": 16,
    "factor": 32.0,
    "attention_factor": 1.25,
}


def made(family: str = "llama", **values: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(COMMON | values))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def difference(path: Path, model: PreTrainedModel, length: int = 40) -> float:
    """Returns the relative error of the logits of the floats of a file."""
    loaded: Any = load_model(str(path), dtype=torch.float32, dequantize=True)
    with torch.no_grad():
        ids = token_ids(1, length) % 96
        return relative(loaded(ids).logits, model(ids).logits)


def factors_of(model: Any) -> torch.Tensor:
    """Returns what the frequencies of a model are divided by, as llama.cpp's converter writes it."""
    inverse = model.model.rotary_emb.inv_freq
    base = model.config.rope_parameters["rope_theta"]
    return base ** (-torch.arange(0, 2 * len(inverse), 2, dtype=torch.float32) / (2 * len(inverse))) / inverse


@pytest.mark.parametrize(
    "changes", [{}, {"factor": 32.0}, {"original_max_position_embeddings": 1000, "high_freq_factor": 3.0}]
)
def test_factors_of_llama_3(changes: dict[str, Any], tmp_path: Path) -> None:
    model = made(head_dim=64, rope_parameters=LLAMA3 | changes)
    file = tmp_path / "tiny.gguf"
    write_model(file, model, "llama", tensors={"rope_freqs.weight": factors_of(model)})
    assert difference(file, model) < 1e-5
    loaded: Any = load(str(file), Recipe(head=None), dtype=torch.float32)
    assert loaded.config.rope_parameters == LLAMA3 | changes
    loaded.save_pretrained(tmp_path / "saved")
    assert AutoConfig.from_pretrained(tmp_path / "saved").rope_parameters == LLAMA3 | changes


def test_other_factors_divide_the_frequencies(tmp_path: Path) -> None:
    model: Any = made(head_dim=16)
    factors = torch.tensor([1.0, 2.0, 1.5, 7.0, 3.0, 1.0, 9.0, 4.0])
    file = tmp_path / "tiny.gguf"
    write_model(file, model, "llama", tensors={"rope_freqs.weight": factors})
    model.model.rotary_emb.inv_freq /= factors
    assert difference(file, model) < 1e-5
    loaded: Any = load(str(file), Recipe(head=None), dtype=torch.float32)
    with torch.no_grad():
        ids = token_ids(1, 40) % 96
        assert relative(loaded(ids).logits, model(ids).logits) < 1e-3


def test_damaged_factors(tmp_path: Path) -> None:
    model = made(head_dim=16)
    for factors in ([1.0] * 7, [1.0] * 7 + [0.0], [float("nan")] * 8):
        write_model(tmp_path / "t.gguf", model, "llama", tensors={"rope_freqs.weight": torch.tensor(factors)})
        with pytest.raises(ValueError, match="rope_freqs.weight in .* numbers, and 8 above 0 are expected"):
            load_model(str(tmp_path / "t.gguf"))


@pytest.mark.parametrize("length", [12, 40])
def test_long_and_short_factors(length: int, tmp_path: Path) -> None:
    model = made("phi3", rope_parameters=dict(LONG), original_max_position_embeddings=16)
    fields = {
        "rope.scaling.type": "longrope",
        "rope.scaling.original_context_length": 16,
        "rope.scaling.attn_factor": 1.25,
    }
    tensors = {
        f"rope_factors_{kind}.weight": torch.tensor(LONG[f"{kind}_factor"]) for kind in ("long", "short")
    }
    write_model(tmp_path / "t.gguf", model, "phi3", fields, tensors)
    assert difference(tmp_path / "t.gguf", model, length) < 1e-5


@pytest.mark.parametrize(
    ("scaling", "fields"),
    [
        ({"rope_type": "linear", "factor": 4.0}, {"type": "linear", "factor": 4.0}),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
            {"type": "yarn", "factor": 4.0, "original_context_length": 128},
        ),
        (
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
            },
            {
                "type": "yarn",
                "factor": 4.0,
                "original_context_length": 128,
                "yarn_beta_fast": 16.0,
                "yarn_beta_slow": 2.0,
            },
        ),
        ({"rope_type": "default"}, {"type": "none", "factor": 4.0}),
    ],
)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_scaling(architecture: str, scaling: dict[str, Any], fields: dict[str, Any], tmp_path: Path) -> None:
    model = made(architecture, head_dim=16, rope_parameters=scaling | {"rope_theta": 1e4})
    header = {f"rope.scaling.{name}": value for name, value in fields.items()}
    write_model(tmp_path / "t.gguf", model, architecture, header)
    assert difference(tmp_path / "t.gguf", model) < 1e-5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention.a_new_field", 3),
        ("logit_scale", 0.5),
        ("residual_scale", 0.5),
        ("embedding_scale", 12.0),
        ("attention.scale", 0.5),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("attention.sliding_window", 16),
        ("attention.sliding_window_pattern", 6),
        ("attention.clamp_kqv", 8.0),
        ("attention.max_alibi_bias", 8.0),
        ("attention.value_length", 8),
        ("attention.causal", False),
        ("rope.dimension_count", 8),
        ("rope.scaling.type", "a new one"),
        ("rope.dimension_sections", [2, 2, 4]),
        ("expert_weights_scale", 2.5),
        ("expert_gating_func", 2),
        ("leading_dense_block_count", 1),
        ("expert_shared_count", 1),
    ],
)
def test_what_the_model_cannot_follow_is_refused(field: str, value: Any, tmp_path: Path) -> None:
    write_model(tmp_path / "t.gguf", made(head_dim=16), "llama", {field: value})
    with pytest.raises(ValueError, match=field.replace(".", r"\.")):
        load_model(str(tmp_path / "t.gguf"))


def test_fields_that_ask_for_nothing(tmp_path: Path) -> None:
    model = made(head_dim=16)
    fields = {
        "logit_scale": 1.0,
        "final_logit_softcapping": 0.0,
        "attention.causal": True,
        "attention.scale": 0.25,
        "attention.sliding_window": 0,
        "expert_count": 0,
        "expert_used_count": 0,
        "leading_dense_block_count": 0,
        "rope.scaling.finetuned": True,
        "rope.scaling.type": "none",
        "tensor_data_layout": "Meta AI original pth",
        "tokenizer.ggml.add_bos_token": True,
    }
    write_model(tmp_path / "t.gguf", model, "llama", fields, {"rope_freqs.weight": torch.ones(8)})
    assert difference(tmp_path / "t.gguf", model) < 1e-5


@pytest.mark.parametrize(
    "name", ["blk.1.attn_q_norm.weight", "blk.0.attn_sinks.weight", "blk.0.ffn_up.scale", "a.new.one"]
)
def test_tensors_that_nobody_reads_are_refused(name: str, tmp_path: Path) -> None:
    write_model(tmp_path / "t.gguf", made(head_dim=16), "llama", tensors={name: torch.ones(16)})
    with pytest.raises(ValueError, match=name):
        load_model(str(tmp_path / "t.gguf"))


def test_some_of_the_biases(tmp_path: Path) -> None:
    model: Any = made(head_dim=16, attention_bias=True)
    tensors = {}
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.o_proj.bias.data.zero_()
        tensors[f"blk.{number}.attn_output.bias"] = None
    write_model(tmp_path / "t.gguf", model, "llama", tensors=tensors)
    assert difference(tmp_path / "t.gguf", model) < 1e-5


def test_all_tokens_that_end_a_turn(tmp_path: Path) -> None:
    ids = {"eos": 5, "eot": 7, "eom": 9, "fim_pad": 11, "fim_rep": 13, "fim_sep": 15}
    fields: dict[str, Any] = {f"tokenizer.ggml.{name}_token_id": number for name, number in ids.items()}
    tokens = [f"t{number}" for number in range(96)]
    tokens[20], tokens[21], tokens[22] = "<|im_end|>", "<end_of_turn>", "<|eot_id|>"
    kinds = [3 if number in (20, 22) else 1 for number in range(96)]
    fields |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    write_model(tmp_path / "t.gguf", made(head_dim=16), "llama", fields)
    model: Any = load(str(tmp_path / "t.gguf"), dtype=torch.float32)
    ends = [*ids.values(), 20, 22]
    assert list(find_eos_token_ids(None, model.generation_config)) == ends
    model.save_pretrained(tmp_path / "saved")
    assert AutoConfig.from_pretrained(tmp_path / "saved").eos_token_id == ends
