"""Peak memory of ``patch`` on a model of one billion parameters, against the size of its BF16 weights.

    python -m bench.patch_memory [--vocabulary 49152]

The weights are random and of the shape of Llama 3.2 1B.  Prints one JSON line; sizes are in bytes.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import torch_armllm


def memory(field: str) -> int:
    """A field of /proc/self/status, such as VmRSS or VmHWM, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def random_model(vocabulary: int, layers: int) -> Any:
    """A BF16 model of Llama 3.2 1B's shape, filled with random weights in place."""
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        model = model.to_empty(device="cpu")
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02)
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.tie_weights()
    return model.eval()


def main() -> None:
    """Runs the measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--layers", type=int, default=16)
    options = parser.parse_args()
    model = random_model(options.vocabulary, options.layers)
    gc.collect()
    resident = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    start = time.perf_counter()
    report = torch_armllm.patch(model, progress=False)
    seconds = time.perf_counter() - start
    peak = memory("VmHWM")
    gc.collect()
    float_bytes = report.bytes_before
    print(
        json.dumps(
            {
                "bf16_bytes": float_bytes,
                "patched_bytes": report.bytes_after,
                "patched_share": round(report.bytes_after / float_bytes, 4),
                "peak_above_bf16_share": round((peak - resident) / float_bytes, 4),
                "resident_before": resident,
                "resident_peak": peak,
                "resident_after": memory("VmRSS"),
                "seconds": round(seconds, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
