"""Every architecture that transformers reads from GGUF files: logits of the model that a file was made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.support.format_results import relative
from tests.support.gguf_models import write_model
from tests.support.models import token_ids
from torch_armllm import Recipe, load
from torch_armllm.checkpoint.load import load_model
from torch_armllm.quant.modules.experts import QuantExperts
from torch_armllm.quant.modules.linear import QuantLinear

COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
LINEAR: dict[str, Any] = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.25,
    },
}
LINEAR_FIELDS: dict[str, Any] = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 64,
    "full_attention_interval": 2,
    "rope.dimension_sections": [2, 1, 1, 0],
}
EXPERTS: dict[str, Any] = {"expert_count": 4, "expert_used_count": 2}
BLOOM: dict[str, Any] = {
    "attention.max_alibi_bias": 8.0,
    "feed_forward_length": 256,
    "attention.head_count_kv": 4,
}
WINDOWED = ["sliding_attention", "full_attention"]
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 32}, {}),
    "llama biased": ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "head_dim": 16}, EXPERTS),
    "qwen2": ("qwen2", {}, {}),
    "qwen2moe": (
        "qwen2_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
        },
        EXPERTS | {"expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 48},
    ),
    "qwen3": ("qwen3", {"head_dim": 32}, {}),
    "qwen3moe": (
        "qwen3_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "head_dim": 32,
            "norm_topk_prob": True,
        },
        EXPERTS | {"expert_feed_forward_length": 32},
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "max_position_embeddings": 4096 * 32,
        },
        EXPERTS
        | {
            "expert_feed_forward_length": 96,
            "attention.sliding_window": 8,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096,
        },
    ),
    "lfm2": (
        "lfm2",
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "conv_L_cache": 3},
        {"attention.head_count_kv": [0, 2], "shortconv.l_cache": 3},
    ),
    "falcon": (
        "falcon",
        {
            "new_decoder_architecture": False,
            "multi_query": True,
            "bias": False,
            "num_kv_heads": 1,
            "tie_word_embeddings": True,
        },
        {"attention.head_count_kv": 1},
    ),
    "falcon grouped": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": False},
        {"attention.head_count_kv": 2},
    ),
    "phi3": ("phi3", {"sliding_window": 8}, {"attention.sliding_window": 8}),
    "bloom": ("bloom", {"tie_word_embeddings": True}, BLOOM),
    "bloom untied": ("bloom", {}, BLOOM),
    "stablelm": ("stablelm", {"use_qkv_bias": True}, {}),
    "stablelm parallel": ("stablelm", {"use_parallel_residual": True}, {"use_parallel_residual": True}),
    "gpt2": (
        "gpt2",
        {"n_inner": None, "tie_word_embeddings": True},
        {"feed_forward_length": 256, "attention.head_count_kv": 4},
    ),
    "starcoder2": ("starcoder2", {"tie_word_embeddings": True, "rope_theta": 5e4}, {}),
    "mamba": (
        "mamba",
        {
            "state_size": 8,
            "time_step_rank": 4,
            "expand": 2,
            "tie_word_embeddings": True,
            "intermediate_size": 128,
        },
        {
            "feed_forward_length": 0,
            "ssm.conv_kernel": 4,
            "ssm.inner_size": 128,
            "ssm.state_size": 8,
            "ssm.time_step_rank": 4,
            "attention.head_count": 0,
            "attention.head_count_kv": 0,
        },
    ),
    "nemotron": ("nemotron", {"head_dim": 16}, {}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 8,
            "tie_word_embeddings": True,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 10.0,
        },
        {"attention.sliding_window": 8, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0},
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 8,
            "tie_word_embeddings": True,
            "layer_types": WINDOWED,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        },
        {
            "attention.sliding_window": 8,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
            "attention.sliding_window_pattern": 2,
        },
    ),
    "gemma4": (
        "gemma4_text",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": 8,
            "layer_types": WINDOWED,
            "tie_word_embeddings": True,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 96,
            "num_kv_shared_layers": 0,
            "final_logit_softcapping": 10.0,
        },
        {
            "attention.sliding_window": 8,
            "attention.sliding_window_pattern": [True, False],
            "attention.head_count_kv": [2, 2],
            "attention.key_length": 32,
            "attention.value_length": 32,
            "attention.key_length_swa": 16,
            "attention.value_length_swa": 16,
            "embedding_length_per_layer_input": 16,
            "attention.shared_kv_layers": 0,
            "final_logit_softcapping": 10.0,
            "rope.freq_base": 1e6,
            "rope.freq_base_swa": 1e4,
            "rope.dimension_count": 32,
            "rope.dimension_count_swa": 16,
        },
    ),
    "minimax-m2": (
        "minimax_m2",
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8},
        EXPERTS | {"expert_feed_forward_length": 96, "expert_gating_func": 2, "rope.dimension_count": 8},
    ),
    "qwen35": ("qwen3_5_text", LINEAR, LINEAR_FIELDS),
    "qwen35moe": (
        "qwen3_5_moe_text",
        LINEAR
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
        },
        LINEAR_FIELDS
        | EXPERTS
        | {
            "feed_forward_length": None,
            "expert_feed_forward_length": 32,
            "expert_shared_feed_forward_length": 48,
        },
    ),
}


def made(kind: str) -> tuple[PreTrainedModel, str, dict[str, Any]]:
    """Returns a tiny float model, llama.cpp's name of its architecture, and the fields of its own."""
    family, values, fields = ARCHITECTURES[kind]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(COMMON | values))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    architecture = "llama" if family == "mixtral" else kind.split()[0]
    return model, architecture, fields


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_logits_are_those_of_the_source(kind: str, tmp_path: Path) -> None:
    model, architecture, fields = made(kind)
    tensors = {"rope_freqs.weight": torch.tensor([1.0] * 4 + [1e30] * 12)} if kind == "gemma4" else {}
    write_model(tmp_path / "tiny.gguf", model, architecture, fields, tensors, tokens=96)
    loaded: Any = load_model(str(tmp_path / "tiny.gguf"), dtype=torch.float32, dequantize=True)
    with torch.no_grad():
        ids = token_ids(2, 24) % 96
        assert relative(loaded(ids).logits, model(ids).logits) < 1e-5


@pytest.mark.parametrize(
    ("kind", "type_", "scheme"),
    [
        ("gpt-oss", "MXFP4", "int8g32"),
        ("gpt-oss", "Q4_1", "g32m"),
        ("qwen35", "Q8_0", "int8g32"),
        ("qwen35", "Q4_0", "g32"),
        ("qwen35moe", "Q4_0", "g32"),
        ("gpt2", "Q8_0", "int8g32"),
        ("gemma4", "Q8_0", "int8g32"),
    ],
)
def test_integers_are_kept(kind: str, type_: str, scheme: str, tmp_path: Path) -> None:
    """Compares packed layers with the floats of the same file, and logits up to INT8 activations."""
    model, architecture, fields = made(kind)
    tensors = {"rope_freqs.weight": torch.tensor([1.0] * 4 + [1e30] * 12)} if kind == "gemma4" else {}
    file = str(tmp_path / "tiny.gguf")
    write_model(tmp_path / "tiny.gguf", model, architecture, fields, tensors, tokens=96, kind=type_)
    expected: Any = load_model(file, dtype=torch.float32, dequantize=True)
    found: Any = load(file, Recipe(head=None), dtype=torch.float32)
    assert not any("rounded" in note for note in found.hf_quantizer.report.notes)
    schemes = set()
    for name, module in found.named_modules():
        if isinstance(module, QuantLinear):
            schemes.add(module.scheme)
            own = expected.get_submodule(name).weight
            own = own.t() if kind == "gpt2" else own
            assert torch.allclose(module.dequantize(), own, rtol=1e-6, atol=1e-6), name
        elif isinstance(module, QuantExperts):
            schemes.add(module.scheme)
            own = expected.get_submodule(name)
            assert module.layout is not None
            for weight, value in zip(
                module.layout.weights, module.layout.store(*module.dequantize()), strict=True
            ):
                assert torch.allclose(value, getattr(own, weight), rtol=1e-6, atol=1e-6), name
    assert schemes == {scheme}
    with torch.no_grad():
        ids = token_ids(2, 24) % 96
        wanted = expected(ids).logits
        errors = (found(ids).logits - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        assert float(errors.median()) < 0.08  # a few tokens may choose another expert
