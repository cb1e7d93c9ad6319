"""Routing of tokens to experts: scores, top-k choice and weights in one call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_armllm.ops.declare import op, reference
from torch_armllm.ops.tables import ENUMS

__all__ = ["SCORINGS", "moe_route", "reference_moe_route"]

SCORINGS = tuple(ENUMS["Scoring"])


def _moe_route_result(a: Any) -> Any:
    shape = (*a.logits.shape[:-1], a.top_k)
    return a.logits.new_empty(shape, dtype=torch.float32), a.logits.new_empty(shape, dtype=torch.int32)


@op(_moe_route_result)
def moe_route(
    logits: Tensor,
    top_k: int,
    scoring: str,
    renormalize: bool,
    scale: float = 1.0,
    correction_bias: Tensor | None = None,
    groups: int = 1,
    top_k_groups: int = 1,
    epsilon: float = 1e-20,
    token_ids: Tensor | None = None,
    choices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Chooses the experts of every token.

    ``softmax`` computes a softmax over all experts and chooses the best (Mixtral, Qwen, OLMoE, DeepSeek-V2).
    ``sigmoid`` scores each expert independently (DeepSeek-V3, arXiv 2412.19437).  ``topk_softmax`` chooses
    the largest logits and computes a softmax over them (gpt-oss); ``topk_sigmoid`` computes their sigmoids.
    ``sparsemixer`` (arXiv 2409.12136) chooses the largest logits, and gives each its share of a softmax over
    the logits near it that no earlier choice took.  ``sqrt_softplus`` scores each expert by the root of
    ``ln(1 + e^logit)`` (DeepSeek-V4).

    With ``choices``, a table names the experts of every token id, and the logits only weigh them.

    With groups, only experts of the best ``top_k_groups`` groups are eligible.  A group is ranked by its best
    score, or with ``sigmoid`` by the sum of its two best.  Among equal scores the lower index comes first.
    NaN ranks below every number; chosen ids are always distinct and in range.

    Args:
        logits: ``(..., experts)`` in float32, bfloat16 or float16; at most 1024 experts.
        top_k: experts per token.
        scoring: one of :data:`SCORINGS`.
        renormalize: whether the chosen weights are divided by their sum.
        scale: factor of the final weights.
        correction_bias: float32 ``(experts,)``, added to the scores only for the choice.
        groups: number of equal groups of experts.
        top_k_groups: number of groups kept.
        epsilon: added to the sum of chosen sigmoids or roots before they are divided by it; with
            ``sparsemixer`` the relative distance up to which logits are near.
        token_ids: int64, one of each token; smaller and larger ids than those of the table count as its first
            and its last.
        choices: int32 ``(vocabulary, top_k)``, the experts of tokens with each id.

    Returns:
        weights, float32 ``(..., top_k)``, and ids, int32 ``(..., top_k)``, best first.

    Raises:
        RuntimeError: a number is out of range, or the scoring is unknown.
    """


@reference("moe_route")
def reference_moe_route(a: Any) -> tuple[Tensor, Tensor]:
    """:func:`moe_route` in plain float32 torch, for finite logits."""
    wide = a.logits.float()
    roots = torch.nn.functional.softplus(wide).sqrt()
    independent = {"softmax": wide.softmax(-1), "sigmoid": wide.sigmoid(), "sqrt_softplus": roots}
    scores = independent.get(a.scoring, wide)
    choice = wide if a.scoring == "softmax" else scores
    if a.correction_bias is not None:
        choice = scores + a.correction_bias
    if a.groups > 1:
        parts = choice.unflatten(-1, (a.groups, -1))
        counted = min(2, parts.shape[-1]) if a.scoring == "sigmoid" else 1
        ranking = parts.topk(counted, dim=-1).values.sum(-1).argsort(dim=-1, descending=True, stable=True)
        dropped = torch.ones_like(ranking, dtype=torch.bool).scatter(
            -1, ranking[..., : a.top_k_groups], False
        )
        choice = parts.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(-2)
    ids = choice.argsort(dim=-1, descending=True, stable=True)[..., : a.top_k]
    if a.choices is not None and a.token_ids is not None:
        ids = a.choices[a.token_ids.flatten().clamp(0, len(a.choices) - 1)].view(ids.shape).long()
    weights = scores.gather(-1, ids)
    if a.scoring == "topk_softmax":
        return weights.softmax(-1) * a.scale, ids.to(torch.int32)
    if a.scoring == "topk_sigmoid":
        weights = weights.sigmoid()
    if a.scoring == "sparsemixer":
        weights = _shares_of_near_logits(wide, ids, a.epsilon)
    if a.renormalize:
        added = a.epsilon if a.scoring in ("sigmoid", "topk_sigmoid", "sqrt_softplus") else 0.0
        weights = weights / (weights.sum(-1, keepdim=True) + added)
    return weights * a.scale, ids.to(torch.int32)


def _shares_of_near_logits(logits: Tensor, ids: Tensor, margin: float) -> Tensor:
    """Returns the weights of ``sparsemixer``."""
    left, shares = logits.clone(), []
    for chosen in ids.split(1, -1):
        top = logits.gather(-1, chosen)
        far = (top - logits) / logits.abs().maximum(top) > margin
        shares.append(1 / (left - top).exp().masked_fill(far, 0.0).sum(-1, keepdim=True))
        left = left.scatter(-1, chosen, float("-inf"))
    return torch.cat(shares, -1)
