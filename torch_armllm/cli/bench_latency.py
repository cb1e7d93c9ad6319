"""The command ``torch-armllm bench latency``."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch_armllm.cli import Subcommands, add_command, add_model
from torch_armllm.cli.option_types import FLOATS
from torch_armllm.cli.parser import Parser
from torch_armllm.cli.setting_options import add_settings, read_settings
from torch_armllm.system.settings import COUNT, FLAG, TEXT, choice, setting

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class _Latency:
    """A measurement, and how its result is printed."""

    engine: str = setting("armllm", choice(("armllm", "transformers")), "engine to measure")
    quantization: str = setting("int4", choice(("int4", "none")), "scheme of the armllm engine")
    dtype: str = setting(
        "bfloat16",
        choice(FLOATS, kind="dtype"),
        "data type of the weights; bf16, fp16 and fp32 are accepted, too",
    )
    prompt_len: int = setting(512, COUNT, "prompt tokens per sequence")
    new_tokens: int = setting(64, COUNT, "tokens to generate per sequence")
    batch_size: str = setting(
        "1", replace(TEXT, shown="N"), "number of sequences per batch, or a list such as 1,4,8"
    )
    repeats: int = setting(2, COUNT, "number of rounds; the median is reported")
    compare: bool = setting(
        False, FLAG, "also measure the unpatched model, alternating with the patched one, and print ratios"
    )
    json: bool = setting(False, FLAG, "print one JSON line per batch size")
    profile: bool = setting(
        False, FLAG, "print a time profile instead: of a decode step after the prompt, then of the prefill"
    )


def add_parser(commands: Subcommands) -> Parser:
    """Adds the command and its options to the parser."""
    parser = add_command(
        commands,
        "latency",
        "measure prefill and decode throughput (tokens per second)",
        "torch-armllm bench latency MODEL --batch-size 1,4,8",
        "torch-armllm bench latency --compare          # beside transformers, in turn",
        "torch-armllm bench latency --profile          # where the time of a step goes",
    )
    add_model(parser)
    add_settings(parser, _Latency)
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace) -> None:
    """Measures the latency and prints the figures of each batch size."""
    import torch

    from torch_armllm.benchmark.latency import measure_in_turn, ratios
    from torch_armllm.checkpoint.load import load_model
    from torch_armllm.patching.patch import patch
    from torch_armllm.patching.state import is_patched

    chosen = read_settings(options, _Latency)
    if chosen.profile and (chosen.compare or chosen.json or chosen.engine != "armllm"):
        raise ValueError(
            "--profile prints tables of the armllm engine only; leave out --compare, --json and --engine"
        )
    sizes = [_positive(part) for part in chosen.batch_size.split(",")]
    if chosen.compare and chosen.engine != "armllm":
        raise ValueError("--compare measures both engines; leave out --engine")
    engines = ["armllm", "transformers"] if chosen.compare else [chosen.engine]
    models = {}
    for engine in engines:
        model = load_model(options.model, getattr(torch, chosen.dtype), progress=not chosen.json)
        if is_patched(model):
            _check_saved(options.model, chosen.quantization, engine)
        elif engine == "armllm":
            quantization = None if chosen.quantization == "none" else chosen.quantization
            patch(model, quantization, progress=not chosen.json)
        models[engine] = model
    if chosen.profile:
        _profile(models["armllm"], sizes, chosen.prompt_len)
        return
    for size in sizes:
        latencies = measure_in_turn(models, size, chosen.prompt_len, chosen.new_tokens, chosen.repeats)
        for engine, latency in latencies.items():
            line = {
                "model": options.model,
                "engine": engine,
                "quant": chosen.quantization if engine == "armllm" else "none",
                "dtype": chosen.dtype,
                **latency.to_dict(),
            }
            if chosen.compare and engine == "armllm":
                line.update(ratios(latency, latencies["transformers"]))
            _print(line, chosen.json)


def _check_saved(model: str, quantization: str, engine: str) -> None:
    if engine != "armllm" or quantization == "none":
        raise ValueError(
            f"{model} was saved quantized and always runs patched; leave out "
            + ("--quantization none" if engine == "armllm" else "--compare and --engine")
            + ", or name the unquantized model"
        )


def _profile(model: PreTrainedModel, sizes: list[int], prompt: int) -> None:
    from torch_armllm.benchmark.step_profile import profile, table

    for size in sizes:
        print(f"decode, batch {size}, after {prompt} tokens\n{table(profile(model, size, prompt))}\n")
    print(f"prefill of {prompt} tokens\n{table(profile(model, prompt=prompt, rounds=3))}")


def _print(line: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(line), flush=True)
        return
    rows = [
        f"prefill {line['prefill_tok_s']:9.1f} tok/s, decode {line['decode_tok_s']:8.1f} tok/s, "
        f"{line['engine']}",
        f"weights {line['weight_bytes'] / 1e6:.0f} MB at {line['weight_gb_s']:.1f} GB/s, "
        f"peak memory {line['peak_rss_bytes'] / 1e6:.0f} MB",
    ]
    if "decode_ratio" in line:
        rows.append(
            f"compared with transformers: prefill {line['prefill_ratio']:.2f}x, "
            f"decode {line['decode_ratio']:.2f}x"
        )
    head = f"batch {line['batch_size']:>3}: "
    print(head + ("\n" + " " * len(head)).join(rows), flush=True)


def _positive(text: str) -> int:
    if not text.strip().isdigit() or int(text) < 1:
        raise ValueError(f"--batch-size must be positive integers separated by commas, got {text!r}")
    return int(text)
