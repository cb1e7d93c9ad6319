"""Tiny models whose layers attend to compressed entries beside their last tokens."""

from __future__ import annotations

from typing import Any

import torch

from torch_armllm.model_survey.tiny_models import tiny_model

SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
_SIZES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", SPARSE, HEAVY, SPARSE],
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    "compress_rates": {SPARSE: 4, HEAVY: 40},
    "sliding_window": 9,
    "index_topk": 5,
    "head_dim": 32,
    "o_lora_rank": 24,
    "o_groups": 2,
    "hc_sinkhorn_iters": 4,
}


@torch.no_grad()
def compressed_model(dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """Returns a tiny model of all kinds of layers; its windows are longer and shorter than blocks."""
    model = tiny_model("deepseek_v4", dtype, **{**_SIZES, **overrides})
    random = torch.Generator().manual_seed(1)
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):  # the initial table sends all tokens to one expert
            experts = [torch.randperm(model.config.n_routed_experts, generator=random) for _ in table]
            table.copy_(torch.stack(experts)[:, : table.shape[1]])
    return model
