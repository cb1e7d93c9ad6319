"""Log-probabilities of tokens, by the model's logits as they came."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_armllm.engine.outputs import Logprob, Logprobs
from torch_armllm.engine.text.detokenizer import TokenStrings
from torch_armllm.ops.sample import top_logprobs


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], counts: Sequence[int], texts: TokenStrings
) -> list[Logprobs]:
    """Log-probability and rank of a token and of the best ones, a row.

    Args:
        logits: ``(R, V)``.
        token_ids: the one of each row that was drawn, or that stands in the prompt.
        counts: how many of the best are wanted beside it; −1: all.
        texts: of tokens.

    Returns:
        By token id, the given token first, then the best ones in order.
    """
    wanted = [logits.shape[1] if count < 0 else count for count in counts]
    own, ranks, best_ids, best = top_logprobs(
        logits, torch.tensor(token_ids, dtype=torch.int64), max(wanted, default=0)
    )
    given = zip(token_ids, own.tolist(), ranks.tolist(), strict=True)
    others = zip(wanted, best_ids.tolist(), best.tolist(), strict=True)
    found = []
    for (token, logprob, rank), (count, ids, logprobs) in zip(given, others, strict=True):
        entries = {token: Logprob(logprob, rank, texts(token))}
        for place in range(count):
            other = ids[place]
            entries.setdefault(other, Logprob(logprobs[place], place + 1, texts(other)))
        found.append(entries)
    return found
