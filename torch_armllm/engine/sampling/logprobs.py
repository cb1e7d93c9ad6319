"""Log-probabilities of tokens, from the model's unprocessed logits."""

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
    """Returns log-probabilities and ranks of one given token and of the best tokens of each row.

    Args:
        logits: ``(R, V)``.
        token_ids: the sampled token of each row, or the prompt's.
        counts: number of best tokens of each row; −1: all.
        texts: strings of single tokens.

    Returns:
        For each row a dict by token id: the given token first, then the best tokens in order.
    """
    limits = [logits.shape[1] if count < 0 else count for count in counts]
    logprobs_given, ranks, best_ids, best = top_logprobs(
        logits, torch.tensor(token_ids, dtype=torch.int64), max(limits, default=0)
    )
    given = zip(token_ids, logprobs_given.tolist(), ranks.tolist(), strict=True)
    others = zip(limits, best_ids.tolist(), best.tolist(), strict=True)
    rows = []
    for (token, logprob, rank), (count, ids, logprobs) in zip(given, others, strict=True):
        entries = {token: Logprob(logprob, rank, texts(token))}
        for position in range(count):
            other = ids[position]
            entries.setdefault(other, Logprob(logprobs[position], position + 1, texts(other)))
        rows.append(entries)
    return rows
