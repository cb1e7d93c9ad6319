"""Sampling in plain torch; every filter sorts the whole vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def philox_uniform(seed: int, step: int) -> float:
    """The uniform random number in 0 … 1 of a row with this seed at this step."""
    counter, key = [step & _MASK, step >> 32 & _MASK, 0, 0], [seed & _MASK, seed >> 32 & _MASK]
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [b >> 32 ^ counter[1] ^ key[0], b & _MASK, a >> 32 ^ counter[3] ^ key[1], a & _MASK]
        key = [key[0] + 0x9E3779B9 & _MASK, key[1] + 0xBB67AE85 & _MASK]
    word: int = counter[0] << 32 | counter[1]
    return (word >> 11) / 2**53


def penalized(
    logits: Tensor, prompt: Tensor, output: Tensor, repetition: float, presence: float, frequency: float
) -> Tensor:
    """One row's float32 logits after the penalties for the tokens of its prompt and output."""
    logits = logits.float()
    counts = torch.bincount(output, minlength=logits.numel()).float()
    seen = (counts > 0) | (torch.bincount(prompt, minlength=logits.numel()) > 0)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    return torch.where(seen, repeated, logits) - frequency * counts - presence * (counts > 0)


def reference_probabilities(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> Tensor:
    """Float64 probabilities ``(V,)`` that one row draws from, after all filters; zero elsewhere."""
    logits = logits.float().nan_to_num(float("-inf"), float("inf"), float("-inf"))
    if temperature < 1e-5:
        return torch.zeros(logits.numel(), dtype=torch.float64).index_fill(0, logits.argmax(), 1.0)
    weights = ((logits - logits.max()) / temperature).exp().double()
    weights[weights < min_p] = 0
    order = weights.argsort(descending=True, stable=True)
    if 0 < top_k < logits.numel():
        weights[weights < weights[order[top_k - 1]]] = 0
    if top_p < 1:
        best = weights[order]
        mass_before = best.cumsum(0) - best
        dropped = mass_before >= top_p * best.sum()
        dropped[0] = False
        weights[order[dropped]] = 0
    return weights / weights.sum()


def reference_sample(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, step: int
) -> int:
    """The token that one row draws, without penalties."""
    cumulative = reference_probabilities(logits, temperature, top_k, top_p, min_p).cumsum(0)
    at = philox_uniform(seed, step) * float(cumulative[-1])
    return int(torch.searchsorted(cumulative, torch.tensor(at, dtype=torch.float64), right=True))


def reference_best_tokens(logits: Tensor) -> Tensor:
    """See `torch_armllm.ops.sample.best_tokens`."""
    numbers = logits.float().nan_to_num(float("-inf"), float("inf"), float("-inf"))
    best = (numbers == numbers.amax(-1, keepdim=True)).int().argmax(-1)
    return best.where(numbers.amax(-1) > float("-inf"), -1)


def reference_top_logprobs(logits: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `torch_armllm.ops.sample.top_logprobs`, for finite logits and NaN."""
    logits = logits.float().nan_to_num(float("-inf"), float("inf"), float("-inf"))
    logprobs = logits.double().log_softmax(-1)
    ranks = (logits > logits.gather(1, ids[:, None])).sum(-1) + 1
    order = logits.argsort(descending=True, stable=True)[:, :count]
    return logprobs.gather(1, ids[:, None])[:, 0].float(), ranks, order, logprobs.gather(1, order).float()
