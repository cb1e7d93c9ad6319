"""GGUF files of Mixture-of-Experts models: stacked experts in every type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from tests.support.format_results import relative, with_rounded_inputs
from tests.support.gguf_files import encode, save
from tests.support.models import tiny, token_ids
from torch_armllm import Recipe, load
from torch_armllm.quant.modules.experts import QuantExperts

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
ROUTING = {"expert_count": 4, "expert_used_count": 2}
FAMILIES: dict[str, tuple[str, gguf.MODEL_ARCH, dict[str, Any], dict[str, Any]]] = {
    "qwen3_moe": (
        "qwen3moe",
        gguf.MODEL_ARCH.QWEN3MOE,
        {"num_experts": 4, "moe_intermediate_size": 256},
        {**ROUTING, "expert_feed_forward_length": 256, "attention.key_length": 32},
    ),
    "qwen2_moe": (
        "qwen2moe",
        gguf.MODEL_ARCH.QWEN2MOE,
        {"num_experts": 4, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 512},
        {**ROUTING, "expert_feed_forward_length": 256, "expert_shared_feed_forward_length": 512},
    ),
    "mixtral": ("llama", gguf.MODEL_ARCH.LLAMA, {"num_local_experts": 4, "intermediate_size": 256}, ROUTING),
}


def write(path: Path, family: str, inner: str, outer: str) -> Any:
    """Writes a tiny model with gates and ups of one type and downs of another; returns its float model."""
    architecture, known, sizes, fields = FAMILIES[family]
    shape = dict(SIZES)
    if family == "qwen2_moe":
        del shape["head_dim"]
    model = tiny(family, **shape, **sizes)
    names = gguf.get_tensor_name_map(known, 2)
    tensors = {}
    for seed, (name, weight) in enumerate(model.state_dict().items()):
        stem, _, suffix = name.rpartition(".")
        if name.endswith((".gate_up_proj", ".down_proj")):
            block = f"blk.{name.split('.')[2]}"
            halves = {"gate": 0, "up": 1} if name.endswith(".gate_up_proj") else {"down": 0}
            for half, place in halves.items():
                kind = outer if half == "down" else inner
                part = weight.chunk(len(halves), 1)[place]
                raw, stands_for = encode(part.contiguous(), kind, 2 * seed + place)
                part.copy_(stands_for)
                tensors[f"{block}.ffn_{half}_exps.weight"] = raw, kind
            continue
        target = names.get_name(stem)
        assert target is not None, name
        kind = "F32" if weight.dim() < 2 or "gate_inp" in target else "Q8_0"
        heads = {"attn_q": 4, "attn_k": 2}.get(target.rpartition(".")[2]) if architecture == "llama" else None
        rows = weight
        if heads:  # llama.cpp's rotary order
            rows = weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        raw, stands_for = encode(rows.squeeze(0).contiguous(), kind)
        if heads:
            stands_for = stands_for.view(heads, -1, 2, weight.shape[1]).transpose(1, 2)
        weight.copy_(stands_for.reshape(weight.shape))
        tensors[f"{target}.{suffix}"] = raw, kind
    config = model.config
    save(
        path,
        architecture,
        {
            "block_count": 2,
            "context_length": 512,
            "embedding_length": config.hidden_size,
            "feed_forward_length": config.intermediate_size,
            "attention.head_count": 4,
            "attention.head_count_kv": 2,
            "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
            "rope.freq_base": float(config.rope_parameters["rope_theta"]),
            "rope.dimension_count": 32 if "head_dim" in shape else 64,
            "vocab_size": config.vocab_size,
            **fields,
        },
        tensors,
    )
    return model


@pytest.mark.parametrize(
    ("family", "inner", "outer", "scheme"),
    [
        ("qwen3_moe", "Q4_0", "Q4_0", "g32"),
        ("qwen3_moe", "Q4_1", "Q4_0", "g32m"),
        ("qwen3_moe", "Q8_0", "Q5_1", "int8g32m"),
        ("qwen3_moe", "Q4_K", "Q4_K", "g32m"),
        ("qwen2_moe", "Q8_0", "Q8_0", "int8g32"),
        ("qwen2_moe", "Q5_K", "Q5_K", "int8g32m"),
        ("mixtral", "Q4_0", "Q4_0", "g32"),
    ],
)
def test_experts_keep_their_integers(
    family: str, inner: str, outer: str, scheme: str, tmp_path: Path
) -> None:
    expected = write(tmp_path / "moe.gguf", family, inner, outer)
    model: Any = load(str(tmp_path / "moe.gguf"), Recipe(head=None), dtype=torch.float32)
    report = model.hf_quantizer.report
    assert report.captured and not any("rounded" in note for note in report.notes), str(report)
    experts = [(name, m) for name, m in model.named_modules() if isinstance(m, QuantExperts)]
    assert len(experts) == 2
    for name, module in experts:
        assert module.scheme == scheme and module.layout is not None
        own = expected.get_submodule(name)
        found = module.layout.store(*module.dequantize())
        for attribute, value in zip(module.layout.weights, found, strict=True):
            assert torch.allclose(value, getattr(own, attribute), rtol=1e-6, atol=1e-6), name
    with torch.no_grad():
        ids = token_ids(1, 6)
        assert relative(model(ids).logits, with_rounded_inputs(expected)(ids).logits) < 2e-3


def test_incompatible_types_are_requantized_and_reported(tmp_path: Path) -> None:
    write(tmp_path / "moe.gguf", "qwen3_moe", "Q4_K", "Q6_K")
    model: Any = load(str(tmp_path / "moe.gguf"), dtype=torch.float32)
    notes = model.hf_quantizer.report.notes
    assert any("8 matrices of Q6_K were rounded to g32m: relative error 0.0" in note for note in notes), notes
    assert not any("Q4_K" in note for note in notes)
