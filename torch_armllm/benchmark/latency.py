"""Prefill and decode rates of one model, batch size by batch size."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from torch_armllm.hf.expert_detection import is_experts
from torch_armllm.hf.output_layer import output_layer_of
from torch_armllm.quant.modules.experts import QuantExperts


@dataclass(frozen=True)
class Latency:
    """One measurement.

    Attributes:
        batch_size, prompt_len, new_tokens, threads: as requested.
        prefill_tok_s: prompt tokens a second, of all sequences together.
        decode_tok_s: generated tokens a second after the first, of all sequences together.
        weight_bytes: all parameters and buffers.
        step_bytes: weights that one decode step reads; for experts an estimate that assumes uniform routing.
        weight_gb_s: `step_bytes` times steps a second: the effective weight bandwidth, 10⁹ bytes a second.
        peak_rss_bytes: peak resident memory of the process, loading included.
    """

    batch_size: int
    prompt_len: int
    new_tokens: int
    threads: int
    prefill_tok_s: float
    decode_tok_s: float
    weight_bytes: int
    step_bytes: int
    weight_gb_s: float
    peak_rss_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, rounded for display."""
        return {k: round(v, 2) if isinstance(v, float) else v for k, v in asdict(self).items()}


class Clock(BaseStreamer):
    """A streamer that records the time of each token; `times[0]` is the start of generation."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Receive the prompt first, then the new tokens of each step."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing; `generate` calls this once at the end."""

    @property
    def prefill(self) -> float:
        """Return the seconds from the prompt to the first token."""
        return self.times[1] - self.times[0]

    @property
    def step(self) -> float:
        """Return the median seconds from one token to the next."""
        return statistics.median(b - a for a, b in zip(self.times[1:], self.times[2:], strict=False))


@torch.no_grad()
def measure(
    model: PreTrainedModel, batch_size: int, prompt_len: int, new_tokens: int, repeats: int = 2
) -> Latency:
    """Generate greedily from random prompts with `model.generate`, and return the best of a few runs.

    Args:
        model: any causal language model, patched or not.
        batch_size: sequences per step, all of the same length.
        prompt_len: tokens of each prompt.
        new_tokens: tokens to generate for each, at least 3.
        repeats: runs that count; one short run before them warms up.

    Raises:
        ValueError: an argument is too small.
    """
    if batch_size < 1 or prompt_len < 1 or new_tokens < 3 or repeats < 1:
        raise ValueError(
            f"batch_size {batch_size}, prompt_len {prompt_len} and repeats {repeats} must be at least 1, "
            f"new_tokens {new_tokens} at least 3"
        )
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    prompt = torch.randint(vocabulary // 2, (batch_size, prompt_len), generator=generator)

    def run(tokens: int) -> Clock:
        clock = Clock()
        model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            streamer=clock,
        )
        return clock

    run(3)
    clocks = [run(new_tokens) for _ in range(repeats)]
    prefill = min(clock.prefill for clock in clocks)
    step = min(clock.step for clock in clocks)
    reads = step_bytes(model, batch_size)
    return Latency(
        batch_size=batch_size,
        prompt_len=prompt_len,
        new_tokens=new_tokens,
        threads=torch.get_num_threads(),
        prefill_tok_s=batch_size * prompt_len / prefill,
        decode_tok_s=batch_size / step,
        weight_bytes=weight_bytes(model),
        step_bytes=reads,
        weight_gb_s=reads / step / 1e9,
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def measure_in_turn(
    models: Mapping[str, PreTrainedModel], batch_size: int, prompt_len: int, new_tokens: int, rounds: int = 2
) -> dict[str, Latency]:
    """Measure several models in alternating rounds, so that a slow minute of the machine affects all of them.

    Args:
        models: the models, by name.
        batch_size: as in `measure`.
        prompt_len: as in `measure`.
        new_tokens: as in `measure`.
        rounds: number of measurements of each; the medians are returned.
    """
    latencies: dict[str, list[Latency]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            latencies[name].append(measure(model, batch_size, prompt_len, new_tokens, repeats=1))
    return {name: _median(runs) for name, runs in latencies.items()}


def _median(runs: list[Latency]) -> Latency:
    rates = ("prefill_tok_s", "decode_tok_s", "weight_gb_s")
    return replace(
        runs[-1], **{name: statistics.median(getattr(run, name) for run in runs) for name in rates}
    )


def ratios(latency: Latency, baseline: Latency) -> dict[str, float]:
    """Return the rates of a measurement divided by the baseline's."""
    return {
        "prefill_ratio": round(latency.prefill_tok_s / baseline.prefill_tok_s, 2),
        "decode_ratio": round(latency.decode_tok_s / baseline.decode_tok_s, 2),
    }


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters and buffers; shared tensors count once."""
    return sum(tensor.nbytes for tensor in _tensors(model))


def step_bytes(model: PreTrainedModel, tokens: int) -> int:
    """Return the bytes of weights that a decode step of ``tokens`` tokens reads; see `Latency`."""
    embeddings = model.get_input_embeddings()
    own = getattr(embeddings, "weight", None)
    shared = own is not None and getattr(output_layer_of(model), "weight", None) is own
    # a step reads single rows of these, not all of them
    looked_up = [getattr(embeddings, "rest", None), None if shared else own]
    total = 0.0
    for tensor in _tensors(model):
        if any(tensor is rows for rows in looked_up):
            continue
        total += tensor.nbytes
    chosen = getattr(model.config.get_text_config(), "num_experts_per_tok", None) or 1
    for module in model.modules():
        if isinstance(module, QuantExperts) or is_experts(module):
            names = ("gate_up_packed", "down_packed", "gate_up_proj", "up_proj", "down_proj")
            weights = [w for name in names if isinstance(w := getattr(module, name, None), Tensor)]
            if weights:
                idle = (1 - min(chosen / weights[0].shape[0], 1.0)) ** tokens
                total -= idle * sum(w.nbytes for w in weights)
    return int(total)


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
