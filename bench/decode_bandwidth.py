"""Bandwidth of decode steps and of a plain memory read, in turn in one process.

    python -m bench.decode_bandwidth --model FOLDER [--batch 1] [--rounds 5] [--state-dtype bfloat16]

FOLDER holds a model that was saved quantized.  Prints a JSON line for each round: GB/s (10⁹ bytes) of the
plain read and of decode steps (medians of 30, after 128 tokens), and their ratio.  A step reads its weights,
and reads and writes the states of recurrent layers; keys and values are not counted.
"""

from __future__ import annotations

import argparse
import json
import time
from random import Random
from statistics import median

import torch

from bench.ops import limits
from torch_armllm.benchmark.latency import step_bytes
from torch_armllm.checkpoint.model_request import ModelRequest
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.execution.plan_runner import PlanRunner
from torch_armllm.engine.llm_engine import LLMEngine
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.llm.loader import load_engine


def step_seconds(engine: LLMEngine, batch: int) -> float:
    """Return the median seconds of a decode step of ``batch`` sequences."""
    params = SamplingParams(temperature=0.0, max_tokens=33, ignore_eos=True)
    random = Random(0)
    for number in range(batch):
        prompt = [random.randrange(engine.sampler.vocab_size) for _ in range(128)]
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    seconds = []
    while engine.has_unfinished_requests():
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    return median(seconds[-30:])


def _state_bytes(engine: LLMEngine, sequences: int) -> int:
    """Return the bytes of states that a decode step reads and writes."""
    runner = engine.runner
    return 2 * sequences * runner.shape.states.bytes_per_sequence if isinstance(runner, PlanRunner) else 0


def main() -> None:
    """Runs the measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--state-dtype", default="float32")
    options = parser.parse_args()
    config = EngineConfig(state_dtype=options.state_dtype, speculative_config=None)
    engine, model, _ = load_engine(
        ModelRequest(options.model, skip_tokenizer_init=True, progress=False), config
    )
    read = (step_bytes(model, options.batch) + _state_bytes(engine, options.batch)) / 1e9
    step_seconds(engine, options.batch)
    for _ in range(options.rounds):
        plain = limits.bandwidth(torch.get_num_threads()) / 1e9
        steps = read / step_seconds(engine, options.batch)
        figures = {"plain_gb_s": plain, "steps_gb_s": steps, "ratio": steps / plain}
        print(json.dumps({name: round(value, 2) for name, value in figures.items()}), flush=True)


if __name__ == "__main__":
    main()
