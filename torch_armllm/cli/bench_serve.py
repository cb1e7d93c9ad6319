"""The command ``torch-armllm bench serve``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING

from torch_armllm.cli import Subcommands, add_command
from torch_armllm.cli import option_types as types
from torch_armllm.cli.parser import Parser
from torch_armllm.cli.workload_options import add_workload_options, ignores_eos

if TYPE_CHECKING:
    from torch_armllm.benchmark.serving.measure import Questions
    from torch_armllm.benchmark.serving.results import ServingResult

_KEY_VARIABLES = ("ARMLLM_API_KEY", "OPENAI_API_KEY")


def add_parser(commands: Subcommands) -> Parser:
    """Adds the command and its options to the parser."""
    parser = add_command(
        commands,
        "serve",
        "measure latency and throughput of a running server",
        "torch-armllm bench serve --base-url http://127.0.0.1:8000 --request-rate 1 2 4 inf",
        "torch-armllm bench serve --prompts questions.jsonl --max-concurrency 8 --json figures.json",
    )
    parser.add_argument(
        "model", nargs="?", help="name of the model in the API (default: the first that the server lists)"
    )
    parser.add_argument(
        "--base-url",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="address of an OpenAI-compatible server",
    )
    parser.add_argument(
        "--endpoint", choices=["chat", "completions"], default="chat", help="kind of requests to send"
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"key of the server (default: the environment variable {' or '.join(_KEY_VARIABLES)})",
    )
    parser.add_argument(
        "--request-rate",
        type=types.rate,
        nargs="+",
        default=[float("inf")],
        metavar="R",
        help="requests per second (Poisson arrivals); several are measured in turn; inf: all at once",
    )
    parser.add_argument(
        "--max-concurrency",
        type=types.positive,
        metavar="N",
        help="maximum number of requests in flight (default: no limit)",
    )
    add_workload_options(parser, "random words", drawn_prompts=100, per=" per rate", temperature=0.0)
    parser.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="a folder or a hub name, for random prompts of exact length (default: a word is a token)",
    )
    parser.add_argument(
        "--warmup",
        type=types.whole,
        default=1,
        metavar="N",
        help="number of requests that are sent first and not counted",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="random seed of prompts and arrival times"
    )
    parser.add_argument(
        "--timeout",
        type=types.seconds,
        default=600.0,
        metavar="SECONDS",
        help="time without data before a request fails",
    )
    parser.add_argument(
        "--json",
        type=types.output_file,
        metavar="FILE",
        help="write the figures under vLLM's names to this file (default: no file)",
    )
    parser.add_argument(
        "--plot",
        type=types.output_file,
        metavar="FILE",
        help="plot throughput against TTFT and TPOT to this file; needs matplotlib (default: no file)",
    )
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace) -> None:
    """Measures each request rate and prints one table per rate."""
    import asyncio

    from torch_armllm.benchmark.serving.client import Target
    from torch_armllm.benchmark.serving.measure import LoadPlan, measure
    from torch_armllm.benchmark.serving.plot import plot
    from torch_armllm.benchmark.serving.table import table
    from torch_armllm.system.extras import require_extra

    _check(options)
    if options.plot is not None:
        require_extra("matplotlib", "bench", "--plot")
    questions, count = _questions(options)
    key = options.api_key or next(filter(None, map(os.environ.get, _KEY_VARIABLES)), None)
    ignore_eos = ignores_eos(options)
    target = Target(
        base_url=options.base_url,
        endpoint=options.endpoint,
        model=options.model,
        api_key=key,
        ignore_eos=ignore_eos,
        temperature=options.temperature,
        timeout=options.timeout,
    )
    plan = LoadPlan(
        num_prompts=count,
        rates=options.request_rate,
        max_concurrency=options.max_concurrency,
        warmup=options.warmup,
        seed=options.seed,
        progress=True,
    )
    models: set[str] = set()
    results: list[ServingResult] = []

    def report_rate(model: str, result: ServingResult) -> None:
        models.add(model)
        results.append(result)
        print(table(result), flush=True)
        for error, times in result.errors.items():
            print(f"failed {times} times: {error}", file=sys.stderr, flush=True)

    asyncio.run(measure(target, questions, plan, report_rate))
    (model,) = models
    if options.json is not None:
        settings = {
            "base_url": options.base_url,
            "endpoint": options.endpoint,
            "model": model,
            "prompts": None if options.prompts is None else str(options.prompts),
            "num_prompts": count,
            "input_len": options.input_len if options.prompts is None else None,
            "output_len": options.output_len,
            "ignore_eos": ignore_eos,
            "temperature": options.temperature,
            "seed": options.seed,
        }
        report = {**settings, "runs": [result.to_dict() for result in results]}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.plot is not None:
        answered = [result for result in results if result.completed]
        if not answered:
            raise ValueError("no request was completed, so there is nothing to plot")
        plot(answered, f"{model}, {options.base_url}", options.plot)


def _questions(options: argparse.Namespace) -> tuple[Questions, int]:
    from torch_armllm.benchmark.serving.prompts import RandomQuestions, RecordedQuestions

    if options.prompts is None:
        drawn = RandomQuestions(options.input_len, options.output_len, options.tokenizer)
        return drawn, options.num_prompts or 100
    recorded = RecordedQuestions(options.prompts, options.output_len, options.endpoint == "completions")
    return recorded, options.num_prompts or len(recorded)


def _check(options: argparse.Namespace) -> None:
    if not options.base_url.startswith(("http://", "https://")):
        raise ValueError(f"--base-url must begin with http:// or https://, got {options.base_url}")
