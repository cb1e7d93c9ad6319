"""The command ``torch-armllm bench throughput``."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

from torch_armllm.cli import Subcommands, add_command, add_model
from torch_armllm.cli.engine_options import add_engine_options, engine_arguments
from torch_armllm.cli.parser import Parser
from torch_armllm.cli.setting_options import add_settings, read_settings
from torch_armllm.cli.workload_options import Workload
from torch_armllm.system.settings import COUNT, FLAG, setting


@dataclass(frozen=True)
class _Throughput(Workload):
    """Requests, and how the result is printed."""

    n: int = setting(1, COUNT, "number of completions per prompt")
    json: bool = setting(False, FLAG, "print one JSON line")


def add_parser(commands: Subcommands) -> Parser:
    """Adds the command and its options to the parser."""
    parser = add_command(
        commands,
        "throughput",
        "measure offline throughput with many requests",
        "torch-armllm bench throughput MODEL --num-prompts 64 --input-len 128 --output-len 128",
        "torch-armllm bench throughput MODEL --prompts questions.jsonl",
    )
    add_model(parser)
    add_settings(parser, _Throughput)
    add_engine_options(parser)
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace) -> None:
    """Measures the throughput and prints it."""
    from torch_armllm.benchmark.throughput import measure, random_prompts, read_prompts
    from torch_armllm.engine.sampling_params import SamplingParams
    from torch_armllm.llm.llm import LLM

    load = read_settings(options, _Throughput)
    params = SamplingParams(
        n=load.n, temperature=load.temperature, max_tokens=load.output_len, ignore_eos=load.ignores_eos
    )
    arguments = engine_arguments(options)
    if load.prompts is None:
        arguments.setdefault("speculative_config", None)  # texts after random prompts repeat themselves
    arguments |= {"runner": "generate", "skip_tokenizer_init": not load.prompts}
    llm = LLM(options.model, progress=not load.json, **arguments)
    if load.prompts is not None:
        prompts = read_prompts(load.prompts, load.num_prompts, llm)
    else:
        count = load.num_prompts or 64
        prompts = random_prompts(count, load.input_len, llm.vocab_size, options.seed or 0)
    throughput = measure(llm, prompts, params, progress=not load.json)
    if load.json:
        print(json.dumps({"model": options.model, **_shown(arguments), **throughput.to_dict()}), flush=True)
    else:
        print(throughput, flush=True)


def _shown(arguments: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in arguments.items() if name != "trace"}
