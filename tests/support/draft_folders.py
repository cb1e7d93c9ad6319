"""Folders of tiny models with draft layers: for multi-token prediction, and EAGLE-3."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from torch_armllm.model_survey.tiny_models import tiny_model

FAMILIES = ("qwen3_next", "qwen3_5_text", "deepseek_v3", "glm4_moe")
LAYERS = 2
"""Layers of the models; the one after them drafts."""
DRAFT_TOKENS = 60
"""Tokens of an EAGLE-3 draft's vocabulary."""


def is_qwen(family: str) -> bool:
    """True if norms multiply by 1 + weight, and names of the draft layer begin with ``mtp``."""
    return family.startswith("qwen")


def _random(generator: torch.Generator, *sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=generator) * 0.1


def _norm(generator: torch.Generator, family: str, size: int) -> Tensor:
    return _random(generator, size) + (0 if is_qwen(family) else 1)


def mtp_folder(
    folder: Path, family: str, exact: bool = False, dtype: torch.dtype = torch.float32, drafting: int = 1
) -> Any:
    """Writes a model of `LAYERS` layers with some for multi-token prediction.

    Args:
        folder: to write to.
        family: a ``model_type``.
        exact: no layer adds anything, and draft layers read the embedding alone: they predict what the model
            does.
        dtype: of the weights.
        drafting: number of layers for multi-token prediction.

    Returns:
        The model with the draft layers as its last layers, for references.
    """
    overrides: dict[str, Any] = {"num_hidden_layers": LAYERS + drafting, "tie_word_embeddings": False}
    if is_qwen(family):
        overrides["layer_types"] = ["linear_attention", "full_attention", "full_attention"]
    model = tiny_model(family, dtype, **overrides)
    if exact:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
                    parameter.zero_()
    model.save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text())
    settings["num_hidden_layers"] = LAYERS
    for name in ("layer_types", "mlp_layer_types"):
        if settings.get(name):
            settings[name] = settings[name][:LAYERS]
    (folder / "config.json").write_text(json.dumps(settings))
    tensors = load_file(folder / "model.safetensors")
    size, generator = model.config.hidden_size, torch.Generator().manual_seed(3)
    if is_qwen(family):
        own = f"model.layers.{LAYERS}."
        tensors = {name.replace(own, "mtp.layers.0."): tensor for name, tensor in tensors.items()}
    for number in range(drafting):
        joined = torch.eye(size, 2 * size) if exact else _random(generator, size, 2 * size)
        neutral = torch.zeros(size) if is_qwen(family) else torch.ones(size)
        norms = [neutral.clone() if exact else _norm(generator, family, size) for _ in range(2)]
        last = tensors["model.norm.weight"].clone() if exact else _norm(generator, family, size)
        added = dict(zip(merge_names(family, number), (*norms, joined, last), strict=True))
        tensors |= {f"{name}.weight": tensor.to(dtype) for name, tensor in added.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return model


def merge_names(family: str, number: int = 0) -> tuple[str, ...]:
    """Returns the names of a draft layer's two first norms, its projection and its last norm."""
    if is_qwen(family):
        return ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
    names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    return tuple(f"model.layers.{LAYERS + number}.{name}" for name in names)


def one_layer_of(model: Any, number: int = 0) -> Any:
    """Returns a base model whose only layer is a draft layer of a model, without a final norm."""
    base = copy.deepcopy(model.base_model)
    base.layers, base.norm = base.layers[LAYERS + number :][:1], nn.Identity()
    base.config.num_hidden_layers = 1
    base.layers[0].self_attn.layer_idx = 0
    if getattr(base.config, "layer_types", None):
        base.config.layer_types = ["full_attention"]
    return base


def eagle3_folder(folder: Path, model: Any, **settings: Any) -> dict[str, Tensor]:
    """Writes an EAGLE-3 draft for a Llama model, and returns its tensors.

    Args:
        folder: to write to.
        model: that it drafts for.
        settings: of its config.json, in the place of the model's.
    """
    config, generator = model.config, torch.Generator().manual_seed(4)
    size, wide = config.hidden_size, 2 * config.hidden_size
    q, kv = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    ids = torch.randperm(config.vocab_size, generator=generator)[:DRAFT_TOKENS].sort().values
    sizes = {
        "fc": (size, 3 * size),
        "lm_head": (DRAFT_TOKENS, size),
        "midlayer.self_attn.q_proj": (q, wide),
        "midlayer.self_attn.k_proj": (kv, wide),
        "midlayer.self_attn.v_proj": (kv, wide),
        "midlayer.self_attn.o_proj": (size, q),
        "midlayer.mlp.gate_proj": (config.intermediate_size, size),
        "midlayer.mlp.up_proj": (config.intermediate_size, size),
        "midlayer.mlp.down_proj": (size, config.intermediate_size),
    }
    norms = (
        "norm",
        *(f"midlayer.{n}" for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")),
    )
    tensors = {f"{name}.weight": _random(generator, *shape) for name, shape in sizes.items()}
    tensors |= {f"{name}.weight": 1 + _random(generator, size) for name in norms}
    known = torch.zeros(config.vocab_size, dtype=torch.bool)
    known[ids] = True
    tensors |= {"d2t": ids - torch.arange(DRAFT_TOKENS), "t2d": known}
    folder.mkdir(parents=True, exist_ok=True)
    described = {
        **config.to_dict(),
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": DRAFT_TOKENS,
        **settings,
    }
    (folder / "config.json").write_text(json.dumps(described, default=str))
    save_file(tensors, folder / "model.safetensors")
    return tensors
