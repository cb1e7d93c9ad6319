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


@torch.no_grad()
def check_chunks_and_batches(model: Any, ids: Tensor, chunks: list[int], padding: int) -> None:
    """Checks that chunks, and a batch in which the first text has padding, yield the bits of whole prompts.

    Args:
        model: a patched model.
        ids: two texts (2, length).
        chunks: lengths of the chunks of both texts.
        padding: tokens of the first text that become padding.
    """
    together = model.model(ids).last_hidden_state
    past, parts = None, []
    for part in ids.split(chunks, 1):
        out = model.model(part, past_key_values=past, use_cache=True)
        past = out.past_key_values
        parts.append(out.last_hidden_state)
    assert torch.equal(torch.cat(parts, 1), together)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    mixed = model.model(ids, attention_mask=mask).last_hidden_state
    assert torch.equal(mixed[1], together[1])
    positions = torch.arange(padding, ids.shape[1])[None]
    alone = model.model(ids[:1, padding:], position_ids=positions).last_hidden_state
    assert torch.equal(mixed[0, padding:], alone[0])
