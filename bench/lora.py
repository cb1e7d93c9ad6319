"""Decode steps with no adapter, with one, and with a different one for each sequence, in turn in one process.

    python -m bench.lora [--model llama-3.2-1b] [--batch 8] [--rank 16] [--lora-dtype auto] [--rounds 9]
                         [--scratch FOLDER]

The model and the adapters have random weights.  A row for each kind has the median milliseconds of a step,
what it takes longer than without adapters, as the median over the rounds, and the bytes of adapters that a
step reads.  ``off`` is an engine without slots for adapters.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
from safetensors.torch import save_file

from bench.case import Row, in_rounds, ratios, run
from bench.engine_steps import QUIET, step_seconds
from torch_armllm import LLM, LoRARequest
from torch_armllm.benchmark.model_shapes import shape_of
from torch_armllm.benchmark.random_model import save_random_model
from torch_armllm.lora.slots import LoraSlots, head_slots, slots_of


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


def lora(
    *,
    model: str = "llama-3.2-1b",
    layers: Annotated[int | None, "of the model; default: all"] = None,
    batch: int = 8,
    rank: int = 16,
    lora_dtype: str = "auto",
    rounds: int = 9,
    scratch: Annotated[Path | None, "keeps the random model; default: a temporary folder"] = None,
) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as temporary:
        home = scratch or Path(temporary)
        save_random_model(shape_of(model, layers), home / model)
        plain = LLM(str(home / model), **QUIET)
        limits = {"max_loras": batch, "max_lora_rank": rank, "lora_dtype": lora_dtype}
        llm = LLM(str(home / model), enable_lora=True, **limits, **QUIET)
        slots, head = slots_of(llm.model), head_slots(llm.model)
        adapted = {n: each for n, each in slots.items() if type(each) is LoraSlots and each is not head}
        requests = []
        for number in range(batch):
            path = home / f"adapter-{number}"
            save_adapter(adapted, rank, path, number)
            requests.append(LoRARequest(path.name, number + 1, str(path)))
        one = sum(layer.a[0].nbytes + layer.b[0].nbytes for layer in adapted.values()) / 1e6
        kinds = {
            "off": (plain.llm_engine, [], 0.0),
            "none": (llm.llm_engine, [], 0.0),
            "one": (llm.llm_engine, [requests[0]] * batch, one),
            "each": (llm.llm_engine, requests, batch * one),
        }
        sides = {
            kind: lambda _, engine=engine, each=each: step_seconds(engine, batch, 32, each)
            for kind, (engine, each, _) in kinds.items()
        }
        found = in_rounds(sides, rounds)
        for kind, seconds in found.items():
            longer = 100 * (median(ratios(seconds, found["none"])) - 1)
            figures = {"ms": 1e3 * median(seconds), "percent_longer": longer, "megabytes": kinds[kind][2]}
            yield {"adapters": kind, **figures}


if __name__ == "__main__":
    run(lora)
