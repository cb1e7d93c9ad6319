"""Prefill and decode rates of this machine on the shapes of well-known models."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from torch_armllm.benchmark.latency import step_bytes
from torch_armllm.benchmark.model_shapes import shape_of
from torch_armllm.benchmark.random_model import save_random_model
from torch_armllm.checkpoint.model_request import ModelRequest
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.llm_engine import LLMEngine
from torch_armllm.engine.sampling_params import RequestOutputKind, SamplingParams
from torch_armllm.engine.text.preprocess import NewRequest
from torch_armllm.llm.loading.loader import load_engine
from torch_armllm.system.host import free_memory

READ_BYTES = 1 << 30
_ROUNDS = 5


@dataclass(frozen=True)
class Works:
    """Workloads measured for each model.

    Attributes:
        prompts: lengths of single prompts.
        batches: numbers of sequences that decode together.
        context: prompt tokens of each of these sequences.
        steps: decode steps of each batch.
        rounds: repetitions; the result is the median.
    """

    prompts: Sequence[int] = (512, 2048)
    batches: Sequence[int] = (1, 8, 16)
    context: int = 1024
    steps: int = 16
    rounds: int = 3


@dataclass(frozen=True)
class Reached:
    """Figures of one measurement.

    Attributes:
        model, layers: name and number of layers of the measured model.
        work: ``prompt 512`` or ``decode, 8``, as `bench.roofline` names them.
        tok_s: tokens a second of all sequences together.
        weight_gb_s: weights read by decode steps, in 10⁹ bytes a second; assumes uniform routing.
    """

    model: str
    layers: int
    work: str
    tok_s: float
    weight_gb_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields, rounded for display."""
        return {k: round(v, 2) if isinstance(v, float) else v for k, v in asdict(self).items()}


def read_bandwidth() -> float:
    """Returns the memory bandwidth of all threads in bytes a second: the best round, since it is a limit."""
    memory = torch.ones(READ_BYTES // 8, dtype=torch.int64)
    times = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        memory.sum()
        times.append(time.perf_counter() - began)
    return READ_BYTES / min(times)


def measure_shape(name: str, folder: Path, works: Works, layers: int | None = None) -> Iterator[Reached]:
    """Measures a model with random weights.

    Args:
        name: one of `torch_armllm.benchmark.model_shapes.SHAPES`.
        folder: folder of its weights; they are written there if missing.
        works: workloads to measure.
        layers: number of layers; None: all.

    Raises:
        ValueError: the model does not fit into the free memory.
    """
    config = shape_of(name, layers)
    save_random_model(config, folder)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if size > 0.8 * (free := free_memory()):
        raise ValueError(
            f"{name} takes {size / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free: measure fewer layers"
        )
    max_model_len = max([*works.prompts, works.context + works.steps + max(works.batches)]) + 1
    loaded = load_engine(
        ModelRequest(str(folder), skip_tokenizer_init=True, progress=False),
        EngineConfig(
            max_model_len=max_model_len,
            max_num_seqs=2
            * max(works.batches),  # sizes the cache for twice the largest batch, so that new blocks fit
            max_num_batched_tokens=max(2048, *works.prompts),
            enable_prefix_caching=False,
            disable_log_stats=True,
            speculative_config=None,  # random weights repeat themselves
        ),
    )
    depth, clock = config.num_hidden_layers, _Clock(loaded.engine, config.vocab_size)
    clock.prompt(min(works.prompts))
    for length in works.prompts:
        seconds = statistics.median(clock.prompt(length) for _ in range(works.rounds))
        yield Reached(name, depth, f"prompt {length}", length / seconds)
    for batch in works.batches:
        step = statistics.median(clock.decode(batch, works.context, works.steps) for _ in range(works.rounds))
        read = step_bytes(loaded.model, batch) / step / 1e9
        yield Reached(name, depth, f"decode, {batch}", batch / step, read)


class _Clock:
    """Times an engine's steps."""

    def __init__(self, engine: LLMEngine, vocabulary: int) -> None:
        self._engine = engine
        self._vocabulary = vocabulary
        self._random = random.Random(0)
        self._numbers = itertools.count()

    def prompt(self, length: int) -> float:
        """Returns the seconds from a prompt to its first token."""
        self._add(length, 1)
        began = time.perf_counter()
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return time.perf_counter() - began

    def decode(self, batch: int, context: int, steps: int) -> float:
        """Returns the median seconds of a step that decodes one token of every sequence."""
        for _ in range(batch):
            self._add(context, steps + batch)
        times = []
        totals = self._engine.stats.totals
        while self._engine.has_unfinished_requests():
            read, written = totals.prompt_tokens, totals.generation_tokens
            began = time.perf_counter()
            self._engine.step()
            spent = time.perf_counter() - began
            if totals.prompt_tokens == read and totals.generation_tokens == written + batch:
                times.append(spent)
        return statistics.median(times)

    def _add(self, length: int, tokens: int) -> None:
        prompt = [self._random.randrange(self._vocabulary) for _ in range(length)]
        params = SamplingParams(
            temperature=0.0,
            max_tokens=tokens,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
            detokenize=False,
        )
        self._engine.add_request(NewRequest(str(next(self._numbers)), prompt, params))
