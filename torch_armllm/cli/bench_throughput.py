"""The command ``torch-armllm bench throughput``."""

from __future__ import annotations

import argparse
import json

from torch_armllm.cli import Subcommands, add_command
from torch_armllm.cli import option_types as types
from torch_armllm.cli.engine_options import add_engine_options, engine_arguments
from torch_armllm.cli.parser import Parser
from torch_armllm.cli.workload_options import add_workload_options, ignores_eos


def add_parser(commands: Subcommands) -> Parser:
    """Adds the command and its options to the parser."""
    parser = add_command(
        commands,
        "throughput",
        "measure offline throughput with many requests",
        "torch-armllm bench throughput MODEL --num-prompts 64 --input-len 128 --output-len 128",
        "torch-armllm bench throughput MODEL --prompts questions.jsonl",
    )
    parser.add_argument(
        "model", nargs="?", default="smollm2", help="smollm2, smollm2-moe, a folder or a hub name"
    )
    add_workload_options(parser, "random tokens", drawn_prompts=64, temperature=1.0)
    parser.add_argument(
        "--n", type=types.positive, default=1, metavar="N", help="number of completions per prompt"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    add_engine_options(parser)
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace) -> None:
    """Measures the throughput and prints it."""
    from torch_armllm.benchmark.throughput import measure, random_prompts, read_prompts
    from torch_armllm.engine.sampling_params import SamplingParams
    from torch_armllm.llm.llm import LLM

    params = SamplingParams(
        n=options.n,
        temperature=options.temperature,
        max_tokens=options.output_len,
        ignore_eos=ignores_eos(options),
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
