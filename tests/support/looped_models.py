"""Tiny models whose layers run several times: of transformers, and of code that comes with a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM, LlamaModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb

from torch_armllm.hf.cache_names import usual_name
from torch_armllm.model_survey.tiny_models import build_tiny, tiny_config, tiny_model


class _Attention(LlamaAttention):  # type: ignore[misc]
    """Keeps the keys of each loop in a cache layer of its own, behind those of the loop before."""

    def forward(self, hidden_states: Tensor, *, loop: int, **kwargs: Any) -> tuple[Tensor, Any]:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (each(hidden_states).view(shape).transpose(1, 2) for each in projections)
        query, key = apply_rotary_pos_emb(query, key, *kwargs.pop("position_embeddings"))
        if (cache := kwargs.pop("past")) is not None:
            key, value = cache.update(key, value, self.layer_idx + loop * self.config.num_hidden_layers)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        mask = kwargs.pop("attention_mask")
        out, weights = attend(self, query, key, value, mask, dropout=0.0, scaling=self.scaling)
        return self.o_proj(out.reshape(*shape[:-2], -1).contiguous()), weights


class LoopedModel(LlamaModel):  # type: ignore[misc]
    """A Llama of which all layers run ``config.loops`` times, with a norm after each, as Ouro has."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for number, layer in enumerate(self.layers):
            layer.self_attn = _Attention(config, number)

    def forward(self, input_ids: Tensor | None = None, **given: Any) -> BaseModelOutputWithPast:
        hidden: Any = given.get("inputs_embeds")
        hidden = self.embed_tokens(input_ids) if hidden is None else hidden
        past, positions, mask = given.get(usual_name()), given.get("position_ids"), None
        if past is None and given.get("use_cache"):
            past = DynamicCache()
        while past is not None and 0 < len(past.layers) < self.config.loops * len(self.layers):
            past.layers += [DynamicLayer()]
        seen = 0 if past is None else past.get_seq_length()
        if positions is None:
            positions = torch.arange(seen, seen + hidden.shape[1])[None]
        if self.config._attn_implementation == "sdpa":
            mask = torch.arange(seen + hidden.shape[1]) <= torch.arange(seen, seen + hidden.shape[1])[:, None]
            mask = mask[None, None]
            if given.get("attention_mask") is not None:
                mask = mask & (given["attention_mask"][:, None, None] != 0)
        angles = self.rotary_emb(hidden, positions)
        for loop in range(self.config.loops):
            for layer in self.layers:
                hidden = layer(hidden, mask, position_embeddings=angles, past=past, loop=loop)
            hidden = self.norm(hidden)
        return BaseModelOutputWithPast(hidden, past)


class LoopedForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    """Predicts tokens by a `LoopedModel`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = LoopedModel(config)
        self.post_init()


class _Looped:
    """Builds a `LoopedForCausalLM` as auto classes build models."""

    @staticmethod
    def from_config(config: Any) -> LoopedForCausalLM:
        """Returns a random model."""
        return LoopedForCausalLM(config)


def looped(
    family: str, dtype: torch.dtype = torch.float32, seed: int = 0, loops: int = 3, **overrides: Any
) -> Any:
    """Returns a tiny random model whose layers run several times.

    Args:
        family: a ``model_type`` of transformers, or ``"code"`` for one that is no family of it.
        dtype: dtype of the parameters.
        seed: seed of the weights.
        loops: times that the layers of ``"code"`` run.
        overrides: configuration values.
    """
    if family != "code":
        return tiny_model(family, dtype, seed, **overrides)
    config = tiny_config("llama", **{"num_hidden_layers": 2, **overrides})
    config.loops = loops
    return build_tiny(_Looped, config, dtype, seed)
