"""Peak memory of ``patch`` on a model of one billion parameters, against the size of its BF16 weights.

    python -m bench.patch_memory [--vocabulary 49152]

The weights are random and of the shape of Llama 3.2 1B.  Sizes in the row are in bytes.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import torch_armllm
from bench.case import Row, run
from bench.peers.shapes import SHAPES
from bench.process_memory import memory


def random_model(vocabulary: int, layers: int) -> Any:
    """Returns a BF16 model of Llama 3.2 1B's shape, filled with random weights in place."""
    changes = {"vocab_size": vocabulary, "num_hidden_layers": layers}
    config = LlamaConfig(**{**SHAPES["1b"].config, **changes})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02)
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.tie_weights()
    return model.eval()


def patch_memory(*, vocabulary: int = 49152, layers: int = 16) -> Iterator[Row]:
    model = random_model(vocabulary, layers)
    gc.collect()
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    began = time.perf_counter()
    report = torch_armllm.patch(model, progress=False)
    seconds = time.perf_counter() - began
    peak = memory("VmHWM")
    gc.collect()
    yield {
        "bf16_bytes": report.bytes_before,
        "patched_bytes": report.bytes_after,
        "patched_share": report.bytes_after / report.bytes_before,
        "peak_above_bf16_share": (peak - before) / report.bytes_before,
        "resident_before": before,
        "resident_peak": peak,
        "resident_after": memory("VmRSS"),
        "seconds": seconds,
    }


if __name__ == "__main__":
    run(patch_memory)
