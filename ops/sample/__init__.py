"""Drawing the next token of every sequence from its logits, in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_armllm.ops.sample.reference import (
    philox_uniform,
    reference_best_tokens,
    reference_probabilities,
    reference_sample,
    reference_top_logprobs,
)

__all__ = [
    "best_tokens",
    "philox_uniform",
    "reference_best_tokens",
    "reference_probabilities",
    "reference_sample",
    "reference_top_logprobs",
    "sample",
    "sample_probabilities",
    "top_logprobs",
]


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    steps: Tensor,
    *,
    repetition_penalty: Tensor | None = None,
    presence_penalty: Tensor | None = None,
    frequency_penalty: Tensor | None = None,
    prompt_ids: Tensor | None = None,
    prompt_offsets: Tensor | None = None,
    output_ids: Tensor | None = None,
    output_offsets: Tensor | None = None,
    logprobs: bool = False,
) -> tuple[Tensor, Tensor]:
    """Draws one token a row: penalties, temperature, min-p, top-k, top-p, then the draw (vLLM's order).

    The random number of a row is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
    2011) with its seed as key and its step as counter, so a row gives the same token whatever else is in the
    batch, on however many threads and on every CPU.  It points into the probabilities in the order of the
    vocabulary.

    Args:
        logits: ``(B, V)`` in float32, bfloat16 or float16.  NaN counts as −∞.
        temperature: float32 ``(B,)``, at least 0; below 1e-5 the largest logit wins, the lowest id of equal
            ones.
        top_k: int64 ``(B,)``; only the k best logits pass, and those equal to the k-th.  0 or less: all.
        top_p: float32 ``(B,)`` in 0 … 1; only the fewest tokens whose probabilities reach it together, the
            best ones and of equal ones the lower ids; at least one.  1: all.
        min_p: float32 ``(B,)`` in 0 … 1; only tokens at least so probable as that part of the best one.
        seeds: int64 ``(B,)``.
        steps: int64 ``(B,)``, another one for every token of a sequence: its position.
        repetition_penalty: float32 ``(B,)``, above 0: divides positive logits of tokens in prompt or output,
            multiplies negative ones (Keskar et al., arXiv 1909.05858).
        presence_penalty: float32 ``(B,)``, subtracted from the logits of tokens in the output.
        frequency_penalty: float32 ``(B,)``, subtracted as often as they are there.
        prompt_ids: int64, the prompts' tokens, concatenated.
        prompt_offsets: int64 ``(B + 1,)``: row b has ``prompt_ids[offsets[b] : offsets[b + 1]]``.
        output_ids: int64, the tokens drawn so far.
        output_offsets: int64 ``(B + 1,)``.
        logprobs: whether log-probabilities are wanted.

    Returns:
        ids, int64 ``(B,)``; and their log-probabilities by ``logits`` as they came, float32 ``(B,)``,
        or ``(0,)`` if not wanted.

    Raises:
        RuntimeError: a shape, dtype or value does not fit, or a row holds no logit above −∞.
    """
    ids, chosen = torch.ops.armllm.sample(
        *(logits, temperature, top_k, top_p, min_p, seeds, steps),
        *(repetition_penalty, presence_penalty, frequency_penalty),
        *(prompt_ids, prompt_offsets, output_ids, output_offsets, logprobs),
    )
    return ids, chosen


@torch.library.register_fake("armllm::sample")
def _(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    steps: Tensor,
    repetition_penalty: Tensor | None = None,
    presence_penalty: Tensor | None = None,
    frequency_penalty: Tensor | None = None,
    prompt_ids: Tensor | None = None,
    prompt_offsets: Tensor | None = None,
    output_ids: Tensor | None = None,
    output_offsets: Tensor | None = None,
    logprobs: bool = False,
) -> tuple[Tensor, Tensor]:
    rows = logits.shape[0]
    return (
        logits.new_empty((rows,), dtype=torch.int64),
        logits.new_empty((rows if logprobs else 0,), dtype=torch.float32),
    )


def sample_probabilities(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    *,
    repetition_penalty: Tensor | None = None,
    presence_penalty: Tensor | None = None,
    frequency_penalty: Tensor | None = None,
    prompt_ids: Tensor | None = None,
    prompt_offsets: Tensor | None = None,
    output_ids: Tensor | None = None,
    output_offsets: Tensor | None = None,
) -> Tensor:
    """The probabilities with which `sample` draws, for the same arguments: float32 ``(B, V)``.

    They are 0 for what a filter holds back; at temperature 0 the best token has 1.

    Raises:
        RuntimeError: see `sample`.
    """
    found: Tensor = torch.ops.armllm.sample_probabilities(
        *(logits, temperature, top_k, top_p, min_p),
        *(repetition_penalty, presence_penalty, frequency_penalty),
        *(prompt_ids, prompt_offsets, output_ids, output_offsets),
    )
    return found


@torch.library.register_fake("armllm::sample_probabilities")
def _(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    repetition_penalty: Tensor | None = None,
    presence_penalty: Tensor | None = None,
    frequency_penalty: Tensor | None = None,
    prompt_ids: Tensor | None = None,
    prompt_offsets: Tensor | None = None,
    output_ids: Tensor | None = None,
    output_offsets: Tensor | None = None,
) -> Tensor:
    return logits.new_empty(logits.shape, dtype=torch.float32)


def best_tokens(logits: Tensor) -> Tensor:
    """The token with the largest logit of each row, as `sample` draws it at temperature 0.

    Args:
        logits: ``(B, V)`` in float32, bfloat16 or float16.  NaN counts as −∞.

    Returns:
        int64 ``(B,)``, of equal ones the lowest; −1 for a row that holds no logit above −∞.

    Raises:
        RuntimeError: the shape or dtype does not fit.
    """
    ids: Tensor = torch.ops.armllm.best_tokens(logits)
    return ids


@torch.library.register_fake("armllm::best_tokens")
def _(logits: Tensor) -> Tensor:
    return logits.new_empty((logits.shape[0],), dtype=torch.int64)


def top_logprobs(logits: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities of one token a row, and of the best ones.

    Args:
        logits: ``(B, V)`` in float32, bfloat16 or float16.  NaN counts as −∞.
        ids: int64 ``(B,)``, below V.
        count: how many of the best ones, at most V.

    Returns:
        float32 ``(B,)``, those of ``ids``; int64 ``(B,)``, their ranks: 1 + how many logits are larger; int64
        ``(B, count)``, the best tokens, of equal ones the lower first; float32 ``(B, count)``, theirs.

    Raises:
        RuntimeError: a shape, dtype or value does not fit.
    """
    own, ranks, best_ids, best = torch.ops.armllm.top_logprobs(logits, ids, count)
    return own, ranks, best_ids, best


@torch.library.register_fake("armllm::top_logprobs")
def _(logits: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = logits.shape[0]
    own = logits.new_empty((rows,), dtype=torch.float32)
    best = logits.new_empty((rows, count), dtype=torch.float32)
    return own, ids.new_empty((rows,)), ids.new_empty((rows, count)), best
