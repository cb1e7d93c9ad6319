"""Bandwidth of decode steps and of a plain memory read, in turn in one process.

    python -m bench.decode_bandwidth --model FOLDER [--batch 1] [--rounds 5] [--state-dtype bfloat16]

FOLDER holds a model that was saved quantized.  A row for each round has GB/s (10⁹ bytes) of the plain read
and of decode steps (medians of 30, after 128 tokens), and their ratio.  A step reads its weights, and reads
and writes the states of recurrent layers; keys and values are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.case import Row, run
from bench.engine_steps import step_seconds
from bench.ops import limits
from torch_armllm.benchmark.latency import step_bytes
from torch_armllm.checkpoint.model_request import ModelRequest
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.execution.plan_runner import PlanRunner
from torch_armllm.llm.loading.loader import load_engine


def decode_bandwidth(
    *, model: str, batch: int = 1, rounds: int = 5, state_dtype: str = "float32"
) -> Iterator[Row]:
    config = EngineConfig(state_dtype=state_dtype, speculative_config=None)
    engine, loaded, _ = load_engine(ModelRequest(model, skip_tokenizer_init=True, progress=False), config)
    read = step_bytes(loaded, batch)
    if isinstance(engine.runner, PlanRunner):
        read += 2 * batch * engine.runner.executor.shape.states.bytes_per_sequence
    step_seconds(engine, batch)
    for _ in range(rounds):
        plain = limits.bandwidth(torch.get_num_threads()) / 1e9
        steps = read / 1e9 / step_seconds(engine, batch)
        yield {"plain_gb_s": plain, "steps_gb_s": steps, "ratio": steps / plain}


if __name__ == "__main__":
    run(decode_bandwidth)
