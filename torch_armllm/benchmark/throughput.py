"""Offline throughput of an engine: tokens a second while many requests wait."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch_armllm.benchmark.prompt_files import Messages, read_prompt_file
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.text.chat_template import render_chat
from torch_armllm.engine.text.preprocess import Prompt
from torch_armllm.llm.llm import LLM


@dataclass(frozen=True)
class Throughput:
    """One measurement.

    Attributes:
        num_requests: completed requests.
        elapsed_s: from the first submission to the last token.
        prompt_tokens, output_tokens: of all requests.
        requests_s, prompt_tok_s, output_tok_s, total_tok_s: rates per second.
        cached_tokens: prompt tokens found in the prefix cache.
        steps: engine steps.
        preemptions: number of preemptions.
    """

    num_requests: int
    elapsed_s: float
    prompt_tokens: int
    output_tokens: int
    requests_s: float
    prompt_tok_s: float
    output_tok_s: float
    total_tok_s: float
    cached_tokens: int
    steps: int
    preemptions: int

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, rounded for display."""
        return {k: round(v, 3) if isinstance(v, float) else v for k, v in asdict(self).items()}

    def __str__(self) -> str:
        return (
            f"{self.num_requests} requests in {self.elapsed_s:.2f} s: {self.requests_s:.2f} requests/s, "
            f"{self.total_tok_s:.1f} tok/s in all, {self.prompt_tok_s:.1f} in, {self.output_tok_s:.1f} out\n"
            f"{self.prompt_tokens} prompt tokens ({self.cached_tokens} of them cached), "
            f"{self.output_tokens} output tokens, {self.steps} steps, {self.preemptions} preemptions"
        )


def random_prompts(count: int, length: int, vocabulary: int, seed: int = 0) -> list[Prompt]:
    """Return prompts of ``length`` random tokens each."""
    draw = random.Random(seed)
    return [[draw.randrange(vocabulary) for _ in range(length)] for _ in range(count)]


def read_prompts(file: Path, count: int | None, llm: LLM) -> list[Prompt]:
    """Return prompts from a file, repeated from its beginning if it has fewer than ``count``.

    Args:
        file: see ``read_prompt_file``.
        count: number of prompts; None: all.
        llm: engine whose chat template turns conversations into prompts.

    Raises:
        ValueError: the file holds no prompt, or a line of another form.
        OSError: the file cannot be read.
    """
    prompts = [_prompt(entry, llm) for entry in read_prompt_file(file)]
    return prompts if count is None else [prompts[i % len(prompts)] for i in range(count)]


def _prompt(entry: str | Messages, llm: LLM) -> Prompt:
    if isinstance(entry, str):
        return entry
    return render_chat(llm.get_tokenizer(), entry, add_generation_prompt=True)


def measure(llm: LLM, prompts: Sequence[Prompt], params: SamplingParams, progress: bool = True) -> Throughput:
    """Submit all prompts together and wait for the last output.

    Args:
        llm: the engine.
        prompts: at least one.
        params: sampling parameters of all prompts.
        progress: True to show a progress bar.
    """
    llm.generate([[0]], replace(params, max_tokens=2, ignore_eos=True), use_tqdm=False)
    before = replace(llm.llm_engine.stats.totals)
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=progress)
    spent = time.perf_counter() - began
    totals = llm.llm_engine.stats.totals
    read = sum(len(output.prompt_token_ids) for output in outputs)
    written = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    return Throughput(
        num_requests=len(outputs),
        elapsed_s=spent,
        prompt_tokens=read,
        output_tokens=written,
        requests_s=len(outputs) / spent,
        prompt_tok_s=read / spent,
        output_tok_s=written / spent,
        total_tok_s=(read + written) / spent,
        cached_tokens=sum(output.num_cached_tokens for output in outputs),
        steps=totals.steps - before.steps,
        preemptions=totals.preemptions - before.preemptions,
    )
