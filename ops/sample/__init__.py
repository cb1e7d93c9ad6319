"""Sampling of the next token of every sequence from its logits, in one call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_armllm.ops.declare import op
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


def _sample_result(a: Any) -> Any:
    rows = a.logits.shape[0]
    return (
        a.logits.new_empty((rows,), dtype=torch.int64),
        a.logits.new_empty((rows if a.logprobs else 0,), dtype=torch.float32),
    )


@op(_sample_result)
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
    """Draws one token per row: penalties, temperature, min-p, top-k, top-p, then the draw (vLLM's order).

    The random number of a row comes from Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as
    1, 2, 3", 2011) with its seed as key and its step as counter.  The token therefore does not depend on the
    rest of the batch, the number of threads or the CPU.  The random number selects a position in the
    cumulative probabilities, in the order of the vocabulary.

    Args:
        logits: ``(B, V)`` in float32, bfloat16 or float16.  NaN counts as −∞.
        temperature: float32 ``(B,)``, at least 0.  Below 1e-5 the token with the largest logit is chosen;
            among equal logits the lowest id.
        top_k: int64 ``(B,)``; only the k largest logits pass, and logits equal to the k-th.  0 or less: all.
        top_p: float32 ``(B,)`` in 0 … 1; only the smallest set of most probable tokens whose probabilities
            sum to at least ``top_p``.  Among equal probabilities lower ids come first.  At least one token
            passes.  1: all.
        min_p: float32 ``(B,)`` in 0 … 1; only tokens with at least ``min_p`` times the largest probability.
        seeds: int64 ``(B,)``.
        steps: int64 ``(B,)``, different for every token of a sequence: the token's position.
        repetition_penalty: float32 ``(B,)``, above 0; for tokens in the prompt or output, positive logits are
            divided by it and negative logits multiplied (Keskar et al., arXiv 1909.05858).
        presence_penalty: float32 ``(B,)``, subtracted from the logits of tokens in the output.
        frequency_penalty: float32 ``(B,)``, subtracted once per occurrence of the token in the output.
        prompt_ids: int64, the prompts' tokens, concatenated.
        prompt_offsets: int64 ``(B + 1,)``: row b has ``prompt_ids[offsets[b] : offsets[b + 1]]``.
        output_ids: int64, the tokens drawn so far, concatenated.
        output_offsets: int64 ``(B + 1,)``.
        logprobs: whether to return log-probabilities.

    Returns:
        The ids, int64 ``(B,)``, and their log-probabilities under the unmodified ``logits``, float32
        ``(B,)``, or ``(0,)`` without ``logprobs``.

    Raises:
        RuntimeError: a shape, dtype or value is wrong, or a row holds no logit above −∞.
    """


@op(lambda a: a.logits.new_empty(a.logits.shape, dtype=torch.float32))
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
    """The probabilities with which `sample` draws tokens for the same arguments: float32 ``(B, V)``.

    Tokens that a filter removes have probability 0.  At temperature 0 the best token has probability 1.

    Raises:
        RuntimeError: see `sample`.
    """


@op(lambda a: a.logits.new_empty((a.logits.shape[0],), dtype=torch.int64))
def best_tokens(logits: Tensor) -> Tensor:
    """The token with the largest logit of each row; the same token as `sample` at temperature 0.

    Args:
        logits: ``(B, V)`` in float32, bfloat16 or float16.  NaN counts as −∞.

    Returns:
        int64 ``(B,)``; among equal logits the lowest id; −1 for a row that holds no logit above −∞.

    Raises:
        RuntimeError: the shape or dtype is wrong.
    """


def _top_logprobs_result(a: Any) -> Any:
    rows = a.logits.shape[0]
    own = a.logits.new_empty((rows,), dtype=torch.float32)
    best = a.logits.new_empty((rows, a.count), dtype=torch.float32)
    return own, a.ids.new_empty((rows,)), a.ids.new_empty((rows, a.count)), best


@op(_top_logprobs_result)
def top_logprobs(logits: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities of one given token per row, and of the most probable tokens.

    Args:
        logits: ``(B, V)`` in float32, bfloat16 or float16.  NaN counts as −∞.
        ids: int64 ``(B,)``, the given tokens, below V.
        count: number of most probable tokens, at most V.

    Returns:
        Four tensors: log-probabilities of ``ids``, float32 ``(B,)``; their ranks, int64 ``(B,)``, which are
        1 + the number of larger logits; the most probable tokens, int64 ``(B, count)``, the lower id first
        among equal logits; their log-probabilities, float32 ``(B, count)``.

    Raises:
        RuntimeError: a shape, dtype or value is wrong.
    """
