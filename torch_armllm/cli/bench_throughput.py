"""``torch-armllm bench throughput``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from torch_armllm.cli import Subcommands
from torch_armllm.cli.engine_options import add_engine_options, engine_arguments


def add_parser(commands: Subcommands) -> argparse.ArgumentParser:
    """Adds the command to the command line."""
    parser = commands.add_parser("throughput", help="tokens a second when many requests wait")
    parser.add_argument("--model", default="smollm2", help="smollm2, smollm2-moe, a folder or a hub name")
    parser.add_argument(
        "--prompts",
        type=Path,
        help='.jsonl with "prompt" or "turns", or a text, a prompt a line; default: random',
    )
    parser.add_argument("--num-prompts", type=int, help="how many (64; of a file: all)")
    parser.add_argument("--input-len", type=int, default=128, help="tokens of a random prompt (128)")
    parser.add_argument("--output-len", type=int, default=128, help="most tokens of an answer (128)")
    parser.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="answers are as long as they may be; default: those to random prompts",
    )
    parser.add_argument("--n", type=int, default=1, help="answers to each prompt (1)")
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="0: always the most probable token (1)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON line")
    add_engine_options(parser)
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace) -> None:
    """Measures, and prints what was found."""
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
    llm = LLM(options.model, progress=not options.json, skip_tokenizer_init=not options.prompts, **arguments)
    if options.prompts is not None:
        prompts = read_prompts(options.prompts, options.num_prompts, llm)
    else:
        count = options.num_prompts or 64
        prompts = random_prompts(count, options.input_len, llm.vocabulary, options.seed or 0)
    found = measure(llm, prompts, params, progress=not options.json)
    if options.json:
        print(json.dumps({"model": options.model, **_said(arguments), **found.to_dict()}), flush=True)
    else:
        print(found, flush=True)


def _said(arguments: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in arguments.items() if name != "trace"}
