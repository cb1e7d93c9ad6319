"""Decode steps with no adapter, with one, and with a different one for each sequence, in turn in one process.

    python -m bench.lora [--model llama-3.2-1b] [--batch 8] [--rank 16] [--lora-dtype auto] [--rounds 9]
                         [--scratch FOLDER]

The model and the adapters have random weights.  Prints a JSON line for each kind: the median milliseconds of
a step, what it takes longer than without adapters, as the median over the rounds, and the bytes of adapters
that a step reads.  ``off`` is an engine without slots for adapters.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median

import torch
from safetensors.torch import save_file

from torch_armllm import LLM, LoRARequest, SamplingParams
from torch_armllm.benchmark.model_shapes import shape_of
from torch_armllm.benchmark.random_model import save_random_model
from torch_armllm.engine.llm_engine import LLMEngine
from torch_armllm.lora.dtypes import LORA_DTYPES
from torch_armllm.lora.slots import LoraSlots, head_slots, slots_of

_STEPS = 32


def save_adapter(layers: dict[str, LoraSlots], rank: int, folder: Path, seed: int) -> None:
    """Writes an adapter of linear layers in PEFT's format."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, layer in layers.items():
        sizes = {"A": (rank, layer.in_features), "B": (layer.out_features, rank)}
        for factor, shape in sizes.items():
            values = torch.randn(shape, generator=generator) * 0.01
            tensors[f"base_model.model.{name}.lora_{factor}.weight"] = values.bfloat16()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def step_seconds(engine: LLMEngine, adapters: Sequence[LoRARequest | None]) -> float:
    """Return the median seconds of a decode step of one sequence for each adapter."""
    params = SamplingParams(temperature=0.0, max_tokens=_STEPS + 1, ignore_eos=True)
    random = Random(0)
    for number, adapter in enumerate(adapters):
        prompt = [random.randrange(engine.runner.vocab_size) for _ in range(128)]
        engine.add_request(str(number), prompt, params, lora_request=adapter)
    seconds = []
    while engine.has_unfinished_requests():
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    return median(seconds[-_STEPS + 2 :])


def measure(options: argparse.Namespace, scratch: Path) -> None:
    """Measures all kinds in turn, and prints their medians."""
    folder = scratch / options.model
    save_random_model(shape_of(options.model), folder)
    settings = {"skip_tokenizer_init": True, "progress": False, "speculative_config": None}
    plain = LLM(str(folder), **settings)
    llm = LLM(
        str(folder),
        enable_lora=True,
        max_loras=options.batch,
        max_lora_rank=options.rank,
        lora_dtype=options.lora_dtype,
        **settings,
    )
    head = head_slots(llm.model)
    layers = {
        n: each for n, each in slots_of(llm.model).items() if type(each) is LoraSlots and each is not head
    }
    requests = []
    for number in range(options.batch):
        path = scratch / f"adapter-{number}"
        save_adapter(layers, options.rank, path, number)
        requests.append(LoRARequest(path.name, number + 1, str(path)))
    one = sum(layer.a[0].nbytes + layer.b[0].nbytes for layer in layers.values())
    kinds: dict[str, tuple[LLMEngine, Sequence[LoRARequest | None], int]] = {
        "off": (plain.llm_engine, [None] * options.batch, 0),
        "none": (llm.llm_engine, [None] * options.batch, 0),
        "one": (llm.llm_engine, [requests[0]] * options.batch, one),
        "each": (llm.llm_engine, requests, options.batch * one),
    }
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(options.rounds + 1):
        for kind, (engine, adapters, _) in kinds.items():
            seconds = step_seconds(engine, adapters)
            if number:  # the first round warms up
                found[kind].append(seconds)
    for kind, (_, _, nbytes) in kinds.items():
        longer = median(a / b for a, b in zip(found[kind], found["none"], strict=True)) - 1
        figures = {"ms": median(found[kind]) * 1e3, "percent_longer": 100 * longer, "megabytes": nbytes / 1e6}
        print(json.dumps({"adapters": kind} | {name: round(n, 2) for name, n in figures.items()}), flush=True)


def main() -> None:
    """Runs the measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lora-dtype", choices=LORA_DTYPES, default="auto")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--scratch", type=Path, help="keeps the random model; default: a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        measure(options, options.scratch or Path(temporary))


if __name__ == "__main__":
    main()
