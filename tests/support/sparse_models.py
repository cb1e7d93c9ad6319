"""Tiny models whose indexers select the tokens that a layer attends to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_armllm.capture.output_check import lowest_first
from torch_armllm.model_survey.tiny_models import tiny_model

FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v32": {},
    "axk2": {},
    "dots3_note_text": {},  # the second layer has a sliding window, and latents of another size
    # the second and third layers attend to what the first selects
    "glm_moe_dsa": {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "shared", "full"]},
}
TOP_K = 16
BLOCKS = "minimax_m3_vl_text"
"""A family whose indexers select two blocks of `SPAN` tokens for each KV head."""
SPAN = 32
_TOKENS = {"index_topk": TOP_K, "index_n_heads": 5, "index_head_dim": 24}
_BLOCKS = {
    "num_hidden_layers": 3,
    "layer_types": ["minimax_m3_sparse", "full_attention", "minimax_m3_sparse"],
    "index_topk_blocks": 2,
    "index_block_size": SPAN,
    "index_head_dim": 24,
}


def sparse_model(family: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """Returns a tiny model whose indexers select `TOP_K` tokens or two blocks; a part of a key is rotated."""
    sizes = _BLOCKS if family == BLOCKS else {**_TOKENS, **FAMILIES[family]}
    return tiny_model(family, dtype, **{**sizes, **overrides})


@torch.no_grad()
def own_logits(model: Any, ids: Tensor, **options: Any) -> Tensor:
    """Returns the logits of an unpatched model, which selects the lowest positions of equal scores."""
    with lowest_first():
        logits: Tensor = model(ids, **options).logits
    return logits
