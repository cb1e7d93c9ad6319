"""The command line: ``torch-armllm demo | bench latency | models | env``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status: 0, or 2 for an error of the user."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    # Only now: `--help` answers at once.
    import torch

    if options.command != "env":
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        if options.threads is not None:
            if options.threads < 1:
                raise ValueError(f"--threads must be at least 1, got {options.threads}")
            torch.set_num_threads(options.threads)
        options.run(options)
    except (ValueError, OSError, ImportError) as error:
        print(f"torch-armllm: error: {error}", file=sys.stderr)
        return 2
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Everything that the command line understands."""
    parser = argparse.ArgumentParser(
        prog="torch-armllm", description="Fast Hugging Face language models on Arm CPUs."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    demo = commands.add_parser("demo", help="a model answers in bfloat16 and in INT4, side by side")
    demo.add_argument(
        "--model", help="a checkpoint's folder or a hub name; default: the embedded SmolLM2, twice"
    )
    demo.add_argument("--prompt", action="append", help="a user message; may be given several times")
    demo.add_argument("--max-new-tokens", type=int, default=48, help="most tokens of an answer (48)")
    demo.set_defaults(run=_demo)

    bench = commands.add_parser("bench", help="measurements").add_subparsers(dest="what", required=True)
    latency = bench.add_parser("latency", help="tokens a second of prompts and of decoding")
    latency.add_argument("--model", default="smollm2", help="smollm2, smollm2-moe, a folder or a hub name")
    latency.add_argument("--engine", choices=["armllm", "transformers"], default="armllm")
    latency.add_argument("--quant", choices=["int4", "none"], default="int4", help="of the armllm engine")
    latency.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    latency.add_argument("--prompt-len", type=int, default=512, help="tokens of each prompt (512)")
    latency.add_argument("--new-tokens", type=int, default=64, help="tokens to generate (64)")
    latency.add_argument("--batch-size", default="1", help="sequences at once: 1 or 1,4,8")
    latency.add_argument("--repeats", type=int, default=2, help="rounds, of which the median counts (2)")
    latency.add_argument(
        "--compare",
        action="store_true",
        help="measure the unpatched model beside the patched one, in turn; medians and ratios",
    )
    latency.add_argument("--json", action="store_true", help="one JSON line a batch size")
    latency.set_defaults(run=_latency)

    env = commands.add_parser("env", help="what this machine offers and what is in the way")
    env.add_argument("--json", action="store_true", help="one JSON object")
    env.set_defaults(run=_env)
    models = commands.add_parser("models", help="what becomes of each causal language model of transformers")
    models.add_argument(
        "family", nargs="*", help="model types such as llama; default: all, which takes minutes"
    )
    models.add_argument("--json", action="store_true", help="one JSON list")
    models.add_argument("--markdown", action="store_true", help="the page docs/models.md")
    models.set_defaults(run=_models)
    for command in (demo, latency, env, models):
        command.add_argument("--threads", type=int, help="cores to use; default: as torch decides")
    return parser


def _demo(options: argparse.Namespace) -> None:
    from torch_armllm.demo import PROMPTS, run_demo

    run_demo(options.model, options.prompt or PROMPTS, options.max_new_tokens)


def _latency(options: argparse.Namespace) -> None:
    import torch

    import torch_armllm
    from torch_armllm.checkpoint import load_model
    from torch_armllm.latency import measure_in_turn, ratios

    sizes = [_positive(part) for part in options.batch_size.split(",")]
    if options.compare and options.engine != "armllm":
        raise ValueError("--compare measures both engines; leave --engine out")
    engines = ["armllm", "transformers"] if options.compare else [options.engine]
    models = {}
    for engine in engines:
        model = load_model(options.model, getattr(torch, options.dtype), progress=not options.json)
        if engine == "armllm":
            quant = None if options.quant == "none" else options.quant
            torch_armllm.patch(model, quantize=quant, progress=not options.json)
        models[engine] = model
    for size in sizes:
        found = measure_in_turn(models, size, options.prompt_len, options.new_tokens, options.repeats)
        for engine, latency in found.items():
            line = {
                "model": options.model,
                "engine": engine,
                "quant": options.quant if engine == "armllm" else "none",
                "dtype": options.dtype,
                **latency.to_dict(),
            }
            if options.compare and engine == "armllm":
                line.update(ratios(latency, found["transformers"]))
            _print_latency(line, options.json)


def _print_latency(line: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(line), flush=True)
        return
    text = (
        f"batch {line['batch_size']:>3}: prompt {line['prefill_tok_s']:9.1f} tok/s, "
        f"decode {line['decode_tok_s']:8.1f} tok/s, weights {line['weight_bytes'] / 1e6:.0f} MB "
        f"at {line['weight_gb_s']:.1f} GB/s, peak memory {line['peak_rss_bytes'] / 1e6:.0f} MB, "
        f"{line['engine']}"
    )
    if "decode_ratio" in line:
        text += f"; prompt {line['prefill_ratio']:.2f} x, decode {line['decode_ratio']:.2f} x of transformers"
    print(text, flush=True)


def _env(options: argparse.Namespace) -> None:
    from torch_armllm.env import describe, render, warnings

    found = describe()
    print(json.dumps({**found, "warnings": warnings(found)}) if options.json else render(found))


def _models(options: argparse.Namespace) -> None:
    from torch_armllm.coverage import table

    rows = list(table.survey_all(options.family, options.threads))
    if options.json:
        print(json.dumps([row.to_dict() for row in rows]))
    else:
        print(table.as_page(rows) if options.markdown else table.as_text(rows))


def _positive(text: str) -> int:
    if not text.strip().isdigit() or int(text) < 1:
        raise ValueError(f"--batch-size takes positive integers separated by commas, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
