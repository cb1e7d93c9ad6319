"""Log-probabilities of tokens, by the model's logits as they came."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_armllm.engine.outputs import Logprob, Logprobs

_ROWS = 32  # at once, so that a long prompt needs no second copy of its logits


def token_logprobs(logits: Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[Logprobs]:
    """Log-probability and rank of a token and of the best ones, a row.

    Args:
        logits: ``(R, V)``.
        token_ids: the one of each row that was drawn, or that stands in the prompt.
        counts: how many of the best are wanted beside it; −1: all.

    Returns:
        By token id, the given token first, then the best ones in order.
    """
    found: list[Logprobs] = []
    for begin in range(0, len(token_ids), _ROWS):
        end = begin + _ROWS
        found += _of_rows(logits[begin:end].float(), token_ids[begin:end], counts[begin:end])
    return found


def _of_rows(logits: Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[Logprobs]:
    total = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(1, torch.tensor(token_ids)[:, None])
    ranks = ((logits > own).sum(-1) + 1).tolist()
    wanted = [logits.shape[1] if count < 0 else count for count in counts]
    best, ids = logits.topk(max(wanted), -1)
    best_list, id_list = (best - total).tolist(), ids.tolist()
    own_list = (own - total)[:, 0].tolist()
    found = []
    for row, token in enumerate(token_ids):
        entries = {token: Logprob(own_list[row], ranks[row])}
        for place in range(wanted[row]):
            entries.setdefault(id_list[row][place], Logprob(best_list[row][place], place + 1))
        found.append(entries)
    return found
