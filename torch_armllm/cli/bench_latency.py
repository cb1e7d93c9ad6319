"""The command ``torch-armllm bench latency``."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from torch_armllm.cli import Subcommands, add_command
from torch_armllm.cli import option_types as types
from torch_armllm.cli.parser import Parser

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
    parser.add_argument(
        "model", nargs="?", default="smollm2", help="smollm2, smollm2-moe, a folder or a hub name"
    )
    parser.add_argument(
        "--engine", choices=["armllm", "transformers"], default="armllm", help="engine to measure"
    )
    parser.add_argument(
        "--quantization", choices=["int4", "none"], default="int4", help="scheme of the armllm engine"
    )
    parser.add_argument(
        "--dtype",
        type=types.dtype,
        choices=types.FLOATS,
        default="bfloat16",
        help="data type of the weights; bf16, fp16 and fp32 are accepted, too",
    )
    parser.add_argument(
        "--prompt-len", type=types.positive, default=512, metavar="N", help="prompt tokens per sequence"
    )
    parser.add_argument(
        "--new-tokens", type=types.positive, default=64, metavar="N", help="tokens to generate per sequence"
    )
    parser.add_argument(
        "--batch-size",
        default="1",
        metavar="N",
        help="number of sequences per batch, or a list such as 1,4,8",
    )
    parser.add_argument(
        "--repeats",
        type=types.positive,
        default=2,
        metavar="N",
        help="number of rounds; the median is reported",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="also measure the unpatched model, alternating with the patched one, and print ratios",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON line per batch size")
    parser.add_argument(
        "--profile",
        action="store_true",
        help="print a time profile instead: of a decode step after the prompt, then of the prefill",
    )
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace) -> None:
    """Measures the latency and prints the figures of each batch size."""
    import torch

    from torch_armllm.benchmark.latency import measure_in_turn, ratios
    from torch_armllm.checkpoint.load import load_model
    from torch_armllm.patching.patch import patch
    from torch_armllm.patching.state import is_patched

    if options.profile and (options.compare or options.json or options.engine != "armllm"):
        raise ValueError(
            "--profile prints tables of the armllm engine only; leave out --compare, --json and --engine"
        )
    sizes = [_positive(part) for part in options.batch_size.split(",")]
    if options.compare and options.engine != "armllm":
        raise ValueError("--compare measures both engines; leave out --engine")
    engines = ["armllm", "transformers"] if options.compare else [options.engine]
    models = {}
    for engine in engines:
        model = load_model(options.model, getattr(torch, options.dtype), progress=not options.json)
        if is_patched(model):
            _check_saved(options, engine)
        elif engine == "armllm":
            quantization = None if options.quantization == "none" else options.quantization
            patch(model, quantization, progress=not options.json)
        models[engine] = model
    if options.profile:
        _profile(models["armllm"], sizes, options.prompt_len)
        return
    for size in sizes:
        latencies = measure_in_turn(models, size, options.prompt_len, options.new_tokens, options.repeats)
        for engine, latency in latencies.items():
            line = {
                "model": options.model,
                "engine": engine,
                "quant": options.quantization if engine == "armllm" else "none",
                "dtype": options.dtype,
                **latency.to_dict(),
            }
            if options.compare and engine == "armllm":
                line.update(ratios(latency, latencies["transformers"]))
            _print(line, options.json)


def _check_saved(options: argparse.Namespace, engine: str) -> None:
    if engine != "armllm" or options.quantization == "none":
        raise ValueError(
            f"{options.model} was saved quantized and always runs patched; leave out "
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
