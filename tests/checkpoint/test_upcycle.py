"""Upcycling of a dense model to a Mixture-of-Experts."""

from __future__ import annotations

import pytest
import torch

from tests.support.models import tiny, token_ids
from torch_armllm.checkpoint.upcycle import upcycle


@torch.no_grad()
def test_copies_without_noise_equal_the_dense_model() -> None:
    dense, ids = tiny("llama"), token_ids(2, 9)
    moe = upcycle(dense, experts=4, top_k=2, noise=0.0)
    assert moe.config.model_type == "mixtral"
    assert torch.allclose(moe(ids).logits, dense(ids).logits, atol=1e-5)


@torch.no_grad()
def test_experts_differ_and_the_rest_is_shared() -> None:
    dense, ids = tiny("llama", tie_word_embeddings=True, dtype=torch.bfloat16), token_ids(1, 9)
    moe = upcycle(dense, experts=4, noise=0.05, seed=1)
    experts = moe.model.layers[0].mlp.experts.gate_up_proj
    assert experts.dtype == torch.bfloat16
    spread = (experts[0].float() - experts[1].float()).std() / experts[0].float().std()
    assert 0.05 < spread < 0.09
    assert moe.lm_head.weight is moe.model.embed_tokens.weight
    assert moe.model.norm.weight is dense.model.norm.weight
    assert not any(p.is_meta for p in moe.parameters())
    assert not any(b.is_meta for b in moe.buffers())
    again = upcycle(dense, experts=4, noise=0.05, seed=1)
    assert torch.equal(moe(ids).logits, again(ids).logits)


def test_models_other_than_llama_without_biases_are_rejected() -> None:
    with pytest.raises(ValueError, match="'qwen3'"):
        upcycle(tiny("qwen3"))
