"""Upcycling of a dense model to a Mixture-of-Experts: the experts are noisy copies of its MLP."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from torch_armllm.system.progress import progress_bar


@torch.no_grad()
def upcycle(
    model: LlamaForCausalLM,
    experts: int = 8,
    top_k: int = 2,
    noise: float = 0.05,
    seed: int = 0,
    progress: bool = False,
) -> MixtralForCausalLM:
    """Builds a Mixtral model whose experts are copies of a Llama model's MLPs with independent noise.

    As the routing weights sum to one, the outputs are close to the dense model's for any routing, while all
    kernels of experts run.  Every other weight is shared, not copied.

    Args:
        model: a Llama model without MLP or attention biases.
        experts: experts per layer.
        top_k: experts per token.
        noise: standard deviation of the noise, relative to that of each weight matrix.
        seed: seed of the noise and the routers.
        progress: shows a bar.

    Source: Komatsuzaki et al., Sparse Upcycling (arXiv 2212.05055).

    Raises:
        ValueError: the model is not a Llama model, or has biases.
    """
    source = model.config
    if source.model_type != "llama" or source.attention_bias or source.mlp_bias:
        raise ValueError(f"only Llama models without biases can be upcycled, got {source.model_type!r}")
    dtype = model.dtype
    config = MixtralConfig(
        **{name: getattr(source, name) for name in _SHARED},
        num_local_experts=experts,
        num_experts_per_tok=top_k,
        sliding_window=None,
        output_router_logits=False,
    )
    with torch.device("meta"):
        moe = MixtralForCausalLM(config).to(dtype)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    generator = torch.Generator().manual_seed(seed)
    for name, _ in list(moe.named_parameters(remove_duplicate=False)):
        if ".mlp." not in name:
            _set_parameter(moe, name, parameters[name])
    # The meta device loses buffers that are computed and not saved.
    moe.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)
    pairs = list(zip(moe.model.layers, model.model.layers, strict=True))
    for layer, dense in progress_bar(pairs, show=progress, desc="Upcycling", unit="layer"):
        gate_up = torch.cat([dense.mlp.gate_proj.weight, dense.mlp.up_proj.weight])
        _set_parameter(layer, "mlp.experts.gate_up_proj", _variations(gate_up, experts, noise, generator))
        down = dense.mlp.down_proj.weight
        _set_parameter(layer, "mlp.experts.down_proj", _variations(down, experts, noise, generator))
        router = torch.randn(experts, config.hidden_size, generator=generator) * 0.02
        _set_parameter(layer, "mlp.gate.weight", router.to(dtype))
    moe.generation_config = copy.deepcopy(model.generation_config)
    return moe.eval()


_SHARED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
_SHIFT = 104729


def _variations(weight: Tensor, count: int, noise: float, generator: torch.Generator) -> Tensor:
    """Returns `count` copies of a weight, each with its own noise: (count, *weight.shape)."""
    size = weight.numel()
    # Copies read one long noise vector at different offsets: separate draws would take much longer.
    plain = weight.float()
    drawn = torch.randn(size + _SHIFT * (count - 1), generator=generator) * (noise * plain.std())
    copies = torch.empty(count, *weight.shape, dtype=weight.dtype)
    for index in range(count):
        start = index * _SHIFT
        copies[index] = plain + drawn[start : start + size].view(weight.shape)
    return copies


def _set_parameter(module: torch.nn.Module, name: str, value: Tensor) -> None:
    parent, _, attribute = name.rpartition(".")
    parameter = (
        value if isinstance(value, torch.nn.Parameter) else torch.nn.Parameter(value, requires_grad=False)
    )
    setattr(module.get_submodule(parent), attribute, parameter)
