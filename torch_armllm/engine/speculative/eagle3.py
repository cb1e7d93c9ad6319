"""EAGLE-3: a draft layer from a folder of its own, which reads the hidden states of three layers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from torch_armllm.checkpoint.load import resolve
from torch_armllm.checkpoint.weight_files import weight_files
from torch_armllm.engine.speculative.draft_layer import DraftHead, DraftLayer, DraftLayers
from torch_armllm.engine.speculative.draft_modules import (
    DraftBase,
    dtype_of,
    hidden_size_of,
    one_layer,
    plan_of,
    quantize_like,
)
from torch_armllm.hf.base_model import base_model_of
from torch_armllm.patching.lm_head import weights_of
from torch_armllm.plan.plan_model import HeadWeights

_FUSED_LAYERS = 3
_HEAD = "lm_head"


class _Layer(nn.Module):
    """A Llama layer whose attention reads the token's embedding beside the hidden state."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm

        size = config.hidden_size
        self.self_attn = LlamaAttention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            wide = nn.Linear(2 * size, narrow.out_features, bias=narrow.bias is not None)
            setattr(self.self_attn, name, wide)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.adds_normalized = bool(getattr(config, "norm_before_residual", False))

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        embeddings, hidden = hidden_states.chunk(2, -1)
        normalized = self.hidden_norm(hidden)
        residual = normalized if self.adds_normalized else hidden
        joined = torch.cat([self.input_layernorm(embeddings), normalized], -1)
        attended, _ = self.self_attn(hidden_states=joined, **kwargs)
        residual = residual + attended
        result: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return result


class _Join(nn.Module):
    def forward(self, embeddings: Tensor, given: Tensor) -> Tensor:
        return torch.cat([embeddings, given], -1)


class Eagle3(nn.Module):
    """The modules of an EAGLE-3 draft.

    Attributes:
        base: from ids and given rows to hidden states, without the embedding.
        fc: from the hidden states of three layers to given rows.
        lm_head: hidden states to logits of the draft's vocabulary.
        token_ids: int64, the model's token id of each of the draft's; None: they are the same.
    """

    def __init__(self, config: Any, columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaModel

        size = config.hidden_size
        vocabulary = getattr(config, "draft_vocab_size", None) or config.vocab_size
        bias = bool(getattr(config, "fc_bias", False))
        stack = LlamaModel(one_layer(config))
        stack.layers = nn.ModuleList([_Layer(stack.config)])
        norm, stack.norm = stack.norm, nn.Identity()
        self.base = DraftBase(_Join(), stack.to(dtype), size, dtype)
        self.base.head_norm = norm
        self.fc = nn.Linear(columns, size, bias=bias)
        self.lm_head = nn.Linear(size, vocabulary, bias=False)
        self.token_ids: Tensor | None = None
        self.to(dtype)


class _OwnHead:
    """The draft's own output layer."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer

    def __call__(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._layer(hidden)
        return logits

    def weights(self, _: Tensor) -> HeadWeights | None:
        return weights_of(self._layer)


def eagle3_modules(model: Any, source: str) -> tuple[Eagle3, nn.Module | None, tuple[int, ...]]:
    """Loads an EAGLE-3 draft.

    Args:
        model: that it drafts for.
        source: a folder or hub name.

    Returns:
        The modules, the draft's own embedding if it has one, and the layers of the model whose inputs it
        reads.

    Raises:
        ValueError: it is no such draft, or belongs to another model.
        OSError: it is not found.
    """
    from transformers import LlamaConfig

    files = weight_files(resolve(source))
    settings = json.loads((files[0].parent / "config.json").read_text())
    config = LlamaConfig.from_dict(settings)
    tensors = {_renamed(name): tensor for file in files for name, tensor in _load(file).items()}
    wrong = [
        name for name in ("fc.weight", "layers.0.hidden_norm.weight", "norm.weight") if name not in tensors
    ]
    if wrong:
        raise ValueError(
            f"{source} is no EAGLE-3 draft: it has no {wrong[0]}; name the folder of a "
            "LlamaForCausalLMEagle3, or choose another method"
        )
    size, dtype = hidden_size_of(model), dtype_of(model)
    columns = tensors["fc.weight"].shape[1]
    if columns != _FUSED_LAYERS * size:
        raise ValueError(
            f"the EAGLE-3 draft {source} reads {columns} values of a token, and three hidden states of this "
            f"model have {_FUSED_LAYERS * size}: name a draft that was trained for it"
        )
    own = tensors.pop("embed_tokens.weight", None)
    if own is None and config.hidden_size != size:
        raise ValueError(
            f"the EAGLE-3 draft {source} has no embedding, its hidden size is {config.hidden_size} and the "
            f"model's {size}: name a draft that was trained for it"
        )
    offsets = tensors.pop("d2t", None)
    tensors.pop("t2d", None)
    draft = Eagle3(config, columns, dtype)
    _fill(draft, tensors, source)
    if offsets is not None:
        draft.token_ids = torch.arange(len(offsets)) + offsets.long()
    vocabulary = model.get_input_embeddings().num_embeddings
    largest = draft.lm_head.out_features - 1 if draft.token_ids is None else int(draft.token_ids.max())
    if largest >= vocabulary:
        raise ValueError(
            f"the EAGLE-3 draft {source} has a token {largest}, and the model {vocabulary} tokens: name a "
            "draft with the same tokenizer"
        )
    if draft.token_ids is None and draft.lm_head.out_features < vocabulary:
        draft.token_ids = torch.arange(draft.lm_head.out_features)
    embedding = None if own is None else nn.Embedding.from_pretrained(own.to(dtype))
    return draft, embedding, _layers(settings, base_model_of(model).config.num_hidden_layers, source)


def _layers(settings: Mapping[str, Any], count: int, source: str) -> tuple[int, ...]:
    """Returns the layers whose inputs a draft reads."""
    nested = settings.get("eagle_config") or {}
    name = "eagle_aux_hidden_state_layer_ids"
    layers = tuple(nested.get(name) or settings.get(name) or (2, count // 2, count - 3))
    if len(layers) != _FUSED_LAYERS or not all(1 <= layer < count for layer in layers):
        raise ValueError(
            f"the EAGLE-3 draft {source} reads the inputs of layers {layers}, and layers 1 … {count - 1} of "
            "the model can be read: name a draft that was trained for it"
        )
    return layers


def _renamed(name: str) -> str:
    return name.removeprefix("model.").replace("midlayer.", "layers.0.")


def _load(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        return load_file(file)
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the pickle's bytes lead to
        raise ValueError(
            f"{file} is damaged, or holds more than tensors, which is not read because it may run code: "
            "download it again, or save its tensors as safetensors"
        ) from error
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise ValueError(f"{file} holds no tensors by name: save the draft's state_dict as safetensors")
    return tensors


def _fill(draft: Eagle3, tensors: dict[str, Tensor], source: str) -> None:
    parts = {
        "fc.": draft.fc,
        "norm.": draft.base.head_norm,
        "lm_head.": draft.lm_head,
        "layers.0.": draft.base.stack.layers[0],
    }
    for prefix, module in parts.items():
        assert module is not None
        own = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        expected = module.state_dict()
        for name, tensor in expected.items():
            if name not in own or own[name].shape != tensor.shape:
                found = tuple(own[name].shape) if name in own else "missing"
                raise ValueError(
                    f"{prefix}{name} of the EAGLE-3 draft {source} is {found}, and its config.json describes "
                    f"{tuple(tensor.shape)}: download the draft again"
                )
        module.load_state_dict({name: own[name] for name in expected})


def eagle3_layers(model: Any, source: str) -> tuple[DraftLayers, tuple[int, ...]]:
    """Builds the draft layer of an EAGLE-3 draft.

    Args:
        model: a patched model.
        source: see `eagle3_modules`.

    Returns:
        The layer, and the layers of the model whose inputs it reads after the last hidden state.

    Raises:
        ValueError: see `eagle3_modules`.
        OSError: see `eagle3_modules`.
    """
    draft, embedding, layers = eagle3_modules(model, source)
    draft.eval()
    quantize_like(model, draft, _HEAD)
    plan, shape = plan_of(draft.base, model, embedding)
    vocabulary = model.get_input_embeddings().num_embeddings
    head = DraftHead(_OwnHead(draft.lm_head), vocabulary, draft.token_ids)
    layer, size = DraftLayer(plan, shape, head, *draft.base.columns_of_rows), hidden_size_of(model)
    return DraftLayers((layer,), draft.fc, range(size, (1 + _FUSED_LAYERS) * size)), layers
