"""The command ``torch-armllm bench throughput``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from torch_armllm.cli import Subcommands
from torch_armllm.cli.engine_options import add_engine_options, engine_arguments


def add_parser(commands: Subcommands) -> argparse.ArgumentParser:
    """Adds the command and its options to the parser."""
    parser = commands.add_parser("throughput", help="measure offline throughput with many requests")
    parser.add_argument(
        "--model", default="smollm2", help="smollm2, smollm2-moe, a folder, a hub name (smollm2)"
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        help='.jsonl with "prompt" or "turns", or text with a prompt per line; default: random',
    )
    parser.add_argument("--num-prompts", type=int, help="number of prompts (64; with --prompts: all)")
    parser.add_argument("--input-len", type=int, default=128, help="tokens per random prompt (128)")
    parser.add_argument("--output-len", type=int, default=128, help="most tokens per completion (128)")
    parser.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="generate up to --output-len whatever the model says; default: for random prompts only",
    )
    parser.add_argument("--n", type=int, default=1, help="completions per prompt (1)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: greedy (1)")
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    add_engine_options(parser)
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace) -> None:
    """Measures the throughput and prints it."""
    from torch_armllm.benchmark.throughput import measure, random_prompts, read_prompts
    from torch_armllm.engine.sampling_params import SamplingParams
    from torch_armllm.llm.llm import LLM

    for name in ("num_prompts", "input_len", "output_len"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    params = SamplingParams(
        n=options.n,
        temperature=options.temperature,
        max_tokens=options.output_len,
        ignore_eos=options.prompts is None if options.ignore_eos is None else options.ignore_eos,
    )
    arguments = engine_arguments(options)
    if options.prompts is None:
        arguments.setdefault("speculative_config", None)  # texts after random prompts repeat themselves
    arguments |= {"runner": "generate", "skip_tokenizer_init": not options.prompts}
    llm = LLM(options.model, progress=not options.json, **arguments)
    if options.prompts is not None:
        prompts = read_prompts(options.prompts, options.num_prompts, llm)
    else:
        count = options.num_prompts or 64
        prompts = random_prompts(count, options.input_len, llm.vocab_size, options.seed or 0)
    throughput = measure(llm, prompts, params, progress=not options.json)
    if options.json:
        print(json.dumps({"model": options.model, **_shown(arguments), **throughput.to_dict()}), flush=True)
    else:
        print(throughput, flush=True)


def _shown(arguments: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in arguments.items() if name != "trace"}
